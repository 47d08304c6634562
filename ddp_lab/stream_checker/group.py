# mypy: disable-error-code="override"
"""A process group as NCCL's is: a collective runs on a stream of the group, and to wait for it only orders streams.

Torch 2.15's `nccl` is the model (docs/status.md): synchronous collectives run on the current stream, `get_future` makes
the current stream wait, and a collective keeps its inputs alive until it is waited for; its outputs live as long as its
handle. A message that is received is the latest of its form that this rank has sent.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_lab.pretended.group import TIMEOUT, Fill, Group, Work
from ddp_lab.stream_checker.device import CheckedDevice, place
from ddp_lab.stream_checker.order import OrderedStream

CONFIG = "cpu:nccl"
"""Tensors of the pretended device lie on the CPU, and NCCL is said to carry them."""


class CheckedWork(Work):
    """A collective under way in `stream`. `results`: what its outputs hold when they arrive."""

    def __init__(
        self,
        group: "CheckedGroup",
        stream: OrderedStream,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> None:
        super().__init__(group.shared.streams, stream.point(), outputs)
        self._group, self._inputs, self._results = group, inputs, results
        group.in_flight.append(inputs)
        self._is_waited_for = False

    def arrive(self) -> None:
        """The outputs hold the results from now on, if they did not before."""
        with self._group.shared.on_host():
            for output, result in zip(self._outputs, self._results, strict=False):
                if output.untyped_storage().nbytes():
                    output.copy_(result)
        self._results = ()

    def wait(self, timeout: Any = TIMEOUT) -> bool:
        super().wait()
        device, group = self._group.shared, self._group
        if not self._is_waited_for:
            self._is_waited_for = True
            device.counts.waits_in_backward += device.is_recording and torch._C._current_graph_task_id() != -1
            group.in_flight = [inputs for inputs in group.in_flight if inputs is not self._inputs]
            self.arrive()
        return True

    def is_completed(self) -> bool:
        return self._is_waited_for  # not before: the device is as late as it may be

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class CheckedGroup(Group):
    """See the module's docstring.

    Attributes:
        in_flight: The inputs of collectives that nobody has waited for; none of those between hosts.
    """

    def __init__(self, shared: CheckedDevice, ranks: Sequence[int], rank: int, config: str, name: str) -> None:
        super().__init__(shared, ranks, rank, config, name)
        self.stream = OrderedStream()
        self.in_flight: list[Sequence[Tensor]] = []

    def _issue(
        self, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], fill: Fill, opts: Any = None
    ) -> CheckedWork:
        device = self.shared
        with device.on_host():
            results = [output.clone() for output in outputs]
            fill(results)
        stream, is_under_way = device.streams.current, False
        if device.is_recording:
            device.counts.collectives += 1
            if getattr(opts, "asyncOp", True):
                stream, is_under_way = self.stream, device.is_late
                stream.wait_stream(device.streams.current)
            elif any(self.in_flight):
                device.counts.stalls += 1
            device.memory.access(stream, inputs, outputs, f"{kind} issued at {place()}")
        flight = CheckedWork(self, stream, inputs if device.is_recording else (), outputs, results)
        if not is_under_way:
            flight.arrive()
            return flight
        with device.on_host():
            for output in outputs:
                output.fill_(float("nan") if output.is_floating_point() else -1)
        return flight

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> Work:
        with self.shared.on_host():
            self.shared.sent.update({(tensor.dtype, tensor.shape): tensor.clone() for tensor in tensors})
        return super().send(tensors, receiver, tag)

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> Work:
        sent = [self.shared.sent[tensor.dtype, tensor.shape] for tensor in tensors]
        return self._issue("receive", [], tensors, lambda filled: torch._foreach_copy_(list(filled), sent))
