"""What all pretended process groups share, and the handles of their collectives."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ddp_lab.planner.contracts import CollectiveCosts, OperatorCall
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.simulation.clock import Flight
from ddp_lab.planner.simulation.streams import Streams
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.loop import StepFollower

TIMEOUT = timedelta(minutes=10)


class CannotSimulate(UserError):
    """Something that cannot be run where tensors hold no data. The message says what and why."""


@dataclass(frozen=True)
class Issued:
    """A collective that has been issued.

    Attributes:
        kind, payload_bytes: As in `ddp_lab.strategy.account.Collective`.
        backend: Carries it: `nccl` or `gloo`.
    """

    kind: str
    payload_bytes: int
    ranks: tuple[int, ...]
    backend: str
    flight: Flight


class StepObserver(StepFollower):
    """Keeps the operators and collectives of a step. The training loop has it in a profiler's place.

    Attributes:
        issued: Collectives that the step has issued.
        computed: Operators, each with its phase, start and end.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """The step that counts begins."""
        self.issued: list[Issued] = []
        self.computed: list[tuple[OperatorCall, str, float, float]] = []


@dataclass(frozen=True)
class Network:
    """What all pretended process groups share.

    Attributes:
        costs: By the backend that carries a collective.
        streams: The rank's. What the current one waits for, it alone waits for.
        on_issue: Called with each collective when it is issued, and the tensors that it reads and writes.
        guards: Collectives in flight that C++ code waits for, by storage (`UntypedStorage._cdata`).
    """

    cluster: Cluster
    costs: Mapping[str, CollectiveCosts]
    streams: Streams
    on_issue: Callable[[Issued, Sequence[Tensor]], None]
    guards: dict[int, Flight] = field(default_factory=dict)


class PretendedWork(dist._Work):
    """The handle of a collective.

    Attributes:
        scratch: Tensors of the backend's own, which live as long as this.
        tells: Whether one can ask if it is done. A send over Gloo says so only when it was waited for (torch 2.15).
    """

    tells = True

    def __init__(self, network: Network, flight: Flight, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._network, self.flight, self._outputs = network, flight, list(outputs)
        self.scratch: Sequence[Tensor] = ()

    def wait(self, timeout: timedelta = TIMEOUT) -> bool:
        """Make the current stream wait."""
        self._network.streams.current.hold(self.flight)
        return True

    def is_completed(self) -> bool:
        return self.tells and self.flight.is_done

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Complete at once, since C++ code cannot be made to run the clock. Whoever touches the tensors before the
        collective is done waits then (`ddp_lab.planner.simulation.operators`)."""
        for tensor in self._outputs:
            self._network.guards[tensor.untyped_storage()._cdata] = self.flight
        future = PretendedFuture(self._settle)
        future.set_result(self._outputs)
        return future

    def _settle(self) -> list[Tensor]:
        self.wait()
        return self._outputs


class PretendedFuture(torch.futures.Future):
    """What communication hooks, and PyTorch's C++ code, wait for.

    Args:
        settle: Makes the rank wait until the value is there, and answers with it.
    """

    def __init__(self, settle: Callable[[], Any]) -> None:
        super().__init__()
        self._settle = settle

    def wait(self) -> Any:
        value = self._settle()
        if not self.done():
            self.set_result(value)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> "PretendedFuture":
        """Runs `callback` when it is waited for; in backward, at its end at the latest, where DDP waits in C++."""
        following = PretendedFuture(lambda: self._follow(callback, following))
        with suppress(RuntimeError):  # not in backward
            torch.autograd.Variable._execution_engine.queue_callback(following.wait)
        return following

    def _follow(self, callback: Callable[[Any], Any], following: "PretendedFuture") -> Any:
        if following.done():
            return following.value()
        self.wait()
        return callback(self)


def holds_data(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
