"""A CPU that pretends to be a device: operators are accesses of the current stream, and some make the host wait."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_lab.pretended.device import Event, Storages, Streams, pretended_streams, resizes_seen
from ddp_lab.strategy.exchange import Exchange
from ddp_lab.strategy.modules import tensors_in
from ddp_lab.strategy.verdict import ReadLater
from ddp_lab.stream_checker.order import CheckedMemory, OrderedStream

ROOT = Path(__file__).resolve().parents[2]
OWN = (str(Path(__file__).parent), str(ROOT / "ddp_lab" / "pretended"), str(ROOT / ".venv"))
WAITING = frozenset(("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"))
"""Operators whose result the host needs, so it waits until the device has computed it."""
COPIES = frozenset(("aten::copy_", "aten::cat", "aten::_foreach_copy_", "aten::clone")) | frozenset(
    ("fsdp::chunk_cat", "fsdp::split_with_sizes_copy", "fsdp::all_gather_copy_in")
)


@dataclass
class CheckedCounts:
    """What a strategy did in all steps that were recorded.

    Attributes:
        races: How often each race was found.
        host_waits: By place in the code, how often the host waited for the device.
        launches: Operators that touch memory.
        collectives: How many were issued, in all groups.
        waits_in_backward: How often a stream waited for a collective in backward, where it could compute.
        stalls: How often a synchronous collective was issued behind others of its group in flight. NCCL runs the
            collectives of a group one after the other (`ncclLaunchPrepare`), so the current stream stands still until
            they end.
        copied_bytes: Bytes written by operators that only copy, those of the model among them.
        losses: Of all steps; empty if they are not finite because of a race.
    """

    races: Counter[str]
    host_waits: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    collectives: int = 0
    waits_in_backward: int = 0
    stalls: int = 0
    copied_bytes: int = 0
    losses: list[float | None] = field(default_factory=list)


class CheckedDevice(TorchDispatchMode):
    """Records while it is the current mode and `is_recording`.

    Args:
        is_late: Collectives end when they are waited for, and until then outputs are NaN. Otherwise they end at once.

    Attributes:
        sent: The tensor that was last sent to another rank, by dtype and shape.
    """

    def __init__(self, is_late: bool = True) -> None:
        super().__init__()
        self.is_late, self.is_recording = is_late, False
        self.streams = Streams(OrderedStream(), OrderedStream)
        self.memory = CheckedMemory()
        self.counts = CheckedCounts(self.memory.races)
        self.sent: dict[tuple[torch.dtype, torch.Size], Tensor] = {}
        self._of_host = Storages[bool](lambda _: None)

    def pin(self, tensor: Tensor) -> None:
        """Count `tensor` as memory of the host from now on, and all that is computed from it alone."""
        self._of_host.add(tensor.untyped_storage(), True)

    def host_reads(self, tensor: Tensor) -> None:
        """Count a wait of the host for the device, unless `tensor` is in memory of the host."""
        if self.is_recording and not self._of_host.of(tensor):
            self.counts.host_waits[place()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_recording or func.namespace not in ("aten", "fsdp") or FakeTensor in types:
            return func(*args, **kwargs)
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor calls the operators on its own part
        answer = func(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(answer)
        if inputs and all(map(self._of_host.of, inputs)):
            for tensor in outputs:
                self.pin(tensor)
            return answer
        schema = func._schema
        if schema.name in WAITING:
            self.host_reads(inputs[0])
        if func.is_view:
            return answer
        # what it touches
        arguments = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written_names = [
            argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
        ]
        written = tensors_in([arguments.get(name) for name in written_names])
        input_ids = {*map(id, inputs)}
        created = [tensor for tensor in outputs if id(tensor) not in input_ids]
        reads = [tensor for tensor in inputs if all(tensor is not target for target in written)]
        if created:
            self.memory.allocated(self.streams.current)
        origin = f"{schema.name.removeprefix('aten::')} at {place()}"
        self.memory.access(self.streams.current, reads, [*written, *created], origin)
        self.counts.launches += 1
        if schema.name in COPIES:
            self.counts.copied_bytes += sum(tensor.nbytes for tensor in (written or created))
        return answer

    def resized(self, storage: UntypedStorage, before: int) -> None:
        """A storage has changed its size; `before`: the bytes that it had."""
        if self.is_recording and storage.nbytes() < before:
            self.memory.free(storage, f"resize_({storage.nbytes()}) at {place()}")
        if self.is_recording and storage.nbytes() > before:
            self.memory.allocated(self.streams.current)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Within this context nothing is recorded: its tensors are those of the host."""
        before, self.is_recording = self.is_recording, False
        try:
            yield
        finally:
            self.is_recording = before


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
def pretended_device(device: CheckedDevice) -> Iterator[None]:
    """Within this context the CPU is a device with streams, and values that are read later are not here yet."""
    plain_begin, plain_list = ReadLater.__init__, Tensor.tolist

    def begin(later: ReadLater, tensor: Tensor) -> None:
        plain_begin(later, tensor.clone())  # the copy to pinned memory
        later.is_here, later._event = False, Event()  # type: ignore[assignment]
        device.pin(later._host)

    def tolist(tensor: Tensor) -> Any:  # it calls no operator
        device.host_reads(tensor)
        return plain_list(tensor)

    with (
        pretended_streams(device.streams),
        # Tensors of an exchange are the host's
        mock.patch.multiple(
            Exchange, _begin=device.on_host()(Exchange._begin), _finish=device.on_host()(Exchange._finish)
        ),
        mock.patch.object(ReadLater, "__init__", begin),  # its name is imported elsewhere, too
        mock.patch.object(Tensor, "tolist", tolist),
        resizes_seen(device.resized),
        device,
    ):
        yield
