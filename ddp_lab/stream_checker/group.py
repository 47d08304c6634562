# mypy: disable-error-code="override, assignment"
"""A process group as NCCL's is: a collective runs on a stream of the group, and to wait for it only orders streams.

Ranks are symmetric: each is taken to hold what this one holds. So a sum is a multiple, a gathered tensor repeats this
rank's part, and a message that is received is the latest of its kind that this rank has sent. Torch 2.15's `nccl` is
the model (docs/status.md): synchronous collectives run on the current stream, `get_future` makes the current stream
wait, and a collective keeps its inputs alive until it is waited for; its outputs live as long as its handle.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.planner.simulation.process_group import GroupWithoutBackend
from ddp_lab.stream_checker.device import Device, place
from ddp_lab.stream_checker.order import Stream

CONFIG = "cpu:nccl"
"""Tensors of the pretended device lie on the CPU, and NCCL is said to carry them."""


class Flight(dist._Work):
    """A collective under way.

    Args:
        arrive: Puts the results where they belong; None if they are there.
    """

    def __init__(
        self,
        group: "CheckedGroup",
        stream: Stream,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        arrive: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._group, self._inputs, self._outputs, self._arrive = group, inputs, list(outputs), arrive
        group.inputs.append(inputs)
        self._end = stream.record_event()
        self._is_waited_for = False

    def wait(self, timeout: Any = None) -> bool:
        device = self._group.device
        device.current.wait_event(self._end)
        if not self._is_waited_for:
            self._is_waited_for = True
            device.collective_waits += device.is_recording
            self._group.inputs = [one for one in self._group.inputs if one is not self._inputs]
            with device.on_host():
                if self._arrive is not None:
                    self._arrive()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._is_waited_for  # not before: the device is as late as it may be

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(self._outputs)
        return done


class CheckedGroup(GroupWithoutBackend):
    """See the module's docstring.

    Args:
        is_late: Results arrive when they are waited for, and until then outputs are NaN. Otherwise they arrive at once.

    Attributes:
        inputs: Of the collectives that nobody has waited for.
    """

    def __init__(self, device: Device, ranks: Sequence[int], rank: int, is_late: bool, name: str) -> None:
        super().__init__(ranks, rank, CONFIG, name)
        self.device, self.is_late = device, is_late
        self.stream = Stream(f"stream of group {name}")
        self.inputs: list[Sequence[Tensor]] = []

    def like_this(self, ranks: Sequence[int], rank: int, config: str, name: str) -> "CheckedGroup":
        return CheckedGroup(self.device, ranks, rank, self.is_late, name)

    def _issue(self, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], opts: Any, results: Any) -> Flight:
        """
        Args:
            results: Makes the new values of `outputs`.
        """
        device = self.device
        with device.on_host():
            values = [value.clone() for value in results()]
        if not device.is_recording:
            return self._arrived(outputs, values)
        stream = device.current
        device.collectives += 1
        if getattr(opts, "asyncOp", True):
            self.stream.wait_stream(device.current)
            stream = self.stream
        elif any(self.inputs):  # those of hosts are empty
            device.stalls += 1
        said = f"{kind} issued at {place()}"
        device.memory.access(stream, inputs, outputs, lambda: said)

        def arrive() -> None:
            for output, value in zip(outputs, values, strict=True):
                if output.untyped_storage().nbytes():
                    output.copy_(value.view_as(output))

        if self.is_late and stream is self.stream:
            with device.on_host():
                for output in outputs:
                    output.fill_(float("nan") if output.is_floating_point() else -1)
        else:
            with device.on_host():
                arrive()
        return Flight(self, stream, inputs, outputs, arrive if self.is_late else None)

    def _arrived(self, outputs: Sequence[Tensor], values: Sequence[Tensor]) -> Flight:
        with self.device.on_host():
            for output, value in zip(outputs, values, strict=True):
                output.copy_(value.view_as(output))
        return Flight(self, self.device.current, (), outputs)

    def _sum(self, tensor: Tensor, opts: Any) -> Tensor:
        """Over ranks that all hold the same."""
        is_sum = opts is None or opts.reduceOp == dist.ReduceOp.SUM
        return tensor * len(self.ranks) if is_sum else tensor

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Flight:
        return self._issue("all_reduce", tensors, tensors, opts, lambda: [self._sum(one, opts) for one in tensors])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Flight:
        return self._issue("broadcast", tensors, tensors, opts, lambda: tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Flight:
        flat = [tensor for received in outputs for tensor in received]
        return self._issue("all_gather", inputs, flat, opts, lambda: [inputs[0]] * len(flat))

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Flight:
        return self._issue("all_gather", [own], [output], opts, lambda: [own.reshape(-1).repeat(len(self.ranks))])

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Flight:
        def results() -> list[Tensor]:
            return [self._sum(whole.reshape(len(self.ranks), -1)[self._rank], opts)]

        return self._issue("reduce_scatter", [whole], [output], opts, results)

    def all_to_all_single(
        self, output: Tensor, whole: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Flight:
        def results() -> list[Tensor]:
            return [whole.reshape(len(self.ranks), -1)[self._rank].repeat(len(self.ranks))]

        return self._issue("all_to_all", [whole], [output], opts, results)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Flight:
        with self.device.on_host():
            self.device.sent.update({(one.dtype, one.shape): one.clone() for one in tensors})
        return self._issue("send", tensors, [], None, list)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Flight:
        sent = self.device.sent
        return self._issue("receive", [], tensors, None, lambda: [sent[one.dtype, one.shape] for one in tensors])

    def barrier(self, opts: Any = None) -> Flight:
        return self._issue("barrier", [], [], opts, list)
