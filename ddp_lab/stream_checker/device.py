"""A device that is pretended by the CPU: operators are accesses of the current stream, and some make the host wait."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_lab.planner.costs.calls import tensors_in
from ddp_lab.strategy.exchange import Exchange
from ddp_lab.strategy.verdict import ReadLater
from ddp_lab.stream_checker.order import Event, Memory, Stream

ROOT = Path(__file__).resolve().parents[2]
OWN = (str(Path(__file__).parent), str(ROOT / ".venv"))
WAITING = frozenset(("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"))
"""Operators whose answer the host needs, so it waits until the device has come so far."""
COPIES = frozenset(("aten::copy_", "aten::cat", "aten::_foreach_copy_", "aten::clone")) | frozenset(
    ("fsdp::chunk_cat", "fsdp::split_with_sizes_copy", "fsdp::all_gather_copy_in")
)


class Device(TorchDispatchMode):
    """Records while it is the current mode and `is_recording`.

    Attributes:
        compute: The stream in which the host issues operators unless it says otherwise.
        current: The stream in which it does so now.
        launches: Operators that touch memory.
        copied_bytes: Bytes that operators wrote that only copy.
        waits: By place in the code, how often the host waited for the device.
        collectives: How many were issued, in all groups.
        collective_waits: How often a stream was made to wait for one.
        stalls: How often a synchronous one was issued behind others of its group in flight. NCCL runs the collectives
            of a group one after the other (`ncclLaunchPrepare`), so the current stream stands still until they end.
        sent: Of each dtype and shape, what was last sent to another rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.current = Stream("compute")
        self.memory = Memory()
        self.is_recording = False
        self.launches = self.copied_bytes = self._streams = 0
        self.waits: Counter[str] = Counter()
        self.collectives = self.collective_waits = self.stalls = 0
        self.sent: dict[tuple[torch.dtype, torch.Size], Tensor] = {}
        self._of_host: dict[int, StorageWeakRef] = {}

    def is_pinned(self, tensor: Tensor) -> None:
        """From now on, `tensor` is one of the host, and so is all that is made of it alone."""
        self._of_host[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())

    def is_of_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._of_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_recording or func.namespace not in ("aten", "fsdp") or FakeTensor in types:
            return func(*args, **kwargs)
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor calls the operators on its own part
        name = func._schema.name
        inputs = tensors_in((*args, *kwargs.values()))
        if inputs and all(map(self.is_of_host, inputs)):
            answer = func(*args, **kwargs)
            for tensor in tensors_in((answer,)):
                self.is_pinned(tensor)
            return answer
        if name in WAITING:
            self.waits[place()] += 1
        self.memory.look_for_freed()
        reads, writes = accessed(func, args, kwargs)
        if reads or writes:
            self._record(name, reads, writes)
        answer = func(*args, **kwargs)
        if not is_view(func):
            made = [tensor for tensor in tensors_in((answer,)) if all(tensor is not old for old in (*reads, *writes))]
            if made:
                self.memory.allocated(self.current)
                self._record(name, [], made, launches=not (reads or writes))
            self.launches += 1
            if name in COPIES:
                self.copied_bytes += sum(tensor.nbytes for tensor in (writes or made))
        return answer

    def _record(self, name: str, reads: list[Tensor], writes: list[Tensor], launches: bool = True) -> None:
        self.memory.access(self.current, reads, writes, lambda: f"{name.removeprefix('aten::')} at {place()}")

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What happens here concerns tensors of the host."""
        before, self.is_recording = self.is_recording, False
        try:
            yield
        finally:
            self.is_recording = before

    def new_stream(self, *_: Any, **__: Any) -> Stream:
        self._streams += 1
        return Stream(f"side stream {self._streams}")

    @contextmanager
    def switch(self, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class DeviceEvent(Event):
    """As `torch.cuda.Event`."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def record(self, stream: Stream | None = None) -> None:
        (stream or self._device.current).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current).wait_event(self)


def is_view(func: Any) -> bool:
    """Whether an operator only gives another view of a tensor."""
    return not func._schema.is_mutable and any(
        result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns
    )


def accessed(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads, and those that it writes in place."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    if is_view(func):
        return reads, writes
    named = {argument.name: argument for argument in func._schema.arguments}
    pairs = [*zip(func._schema.arguments, args, strict=False), *((named[key], value) for key, value in kwargs.items())]
    for argument, value in pairs:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(tensors_in((value,)))
    return reads, writes


def place() -> str:
    """The innermost line of this project, outside of the checker, that is being executed."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT)) and not name.startswith(OWN):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a library"


@contextmanager
def pretended_device(device: Device) -> Iterator[None]:
    """Within this context the CPU is a device with streams, and values that are read later are not here yet."""

    plain_begin = ReadLater.__init__

    def begin(later: ReadLater, tensor: Tensor) -> None:
        plain_begin(later, tensor.clone())  # the copy to pinned memory
        later.is_here = False

    def read(later: ReadLater) -> Tensor:
        device.is_pinned(later._host)
        return later._host

    def on_host(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with device.on_host():
                return method(*args, **kwargs)

        return call

    plain_resize = UntypedStorage.resize_

    def resize(storage: UntypedStorage, size: int) -> Any:
        if device.is_recording and size < storage.nbytes():
            device.memory.free(storage, f"resize_({size}) at {place()}")
        if device.is_recording and size > storage.nbytes():
            device.memory.allocated(device.current)
        return plain_resize(storage, size)

    plain_list = Tensor.tolist

    def tolist(tensor: Tensor) -> Any:  # it calls no operator
        if device.is_recording and not device.is_of_host(tensor):
            device.waits[place()] += 1
        return plain_list(tensor)

    def current_stream(_: Any = None) -> Any:
        return device.current

    streams = {
        "Stream": device.new_stream,
        "Event": lambda *_, **__: DeviceEvent(device),
        "current_stream": current_stream,
        "stream": device.switch,
    }
    with ExitStack() as stack:
        for name, made in streams.items():
            stack.enter_context(mock.patch.object(torch.cpu, name, made))
        for name in ("_begin", "_finish"):  # of an exchange, whose tensors are the host's
            stack.enter_context(mock.patch.object(Exchange, name, on_host(getattr(Exchange, name))))
        stack.enter_context(mock.patch.object(Exchange, "shares_stay_on_device", True))
        stack.enter_context(mock.patch.object(ReadLater, "__init__", begin))  # its name is imported elsewhere, too
        stack.enter_context(mock.patch.object(ReadLater, "tensor", read))
        stack.enter_context(mock.patch.object(UntypedStorage, "resize_", resize))
        stack.enter_context(mock.patch.object(Tensor, "tolist", tolist))
        stack.enter_context(device)
        yield
