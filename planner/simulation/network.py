"""What all pretended process groups share: the clock and the costs. And the handles of their collectives."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.contracts import CollectiveCost, CollectiveCosts
from planner.costs.cluster import Cluster
from planner.simulation.clock import Clock, Flight, Queue
from planner.simulation.streams import Streams
from training.errors import UserError

TIMEOUT = timedelta(minutes=10)


class CannotSimulate(UserError):
    """Something that cannot be run where tensors hold no data. The message says what and why."""


@dataclass(frozen=True)
class Issued:
    """A collective that has been issued.

    Attributes:
        kind, payload_bytes: As in `training.communication.traffic.Collective`.
        backend: Carries it: `nccl` or `gloo`.
    """

    kind: str
    payload_bytes: int
    ranks: tuple[int, ...]
    backend: str
    flight: Flight


class Network:
    """See the module's docstring.

    Args:
        streams: The rank's. What the current one waits for, it alone waits for.
        on_issue: Called with each collective when it is issued, and the tensors that it reads and writes.
        host_costs: Of collectives of tensors in host memory, where the cluster's backend does not carry them.

    Attributes:
        guards: Collectives in flight that C++ code waits for, by storage (`UntypedStorage._cdata`).
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        costs: CollectiveCosts,
        streams: Streams,
        on_issue: Callable[[Issued, Sequence[Tensor]], None],
        host_costs: CollectiveCosts,
    ) -> None:
        self.cluster, self.clock, self._costs, self._on_issue = cluster, clock, costs, on_issue
        self._streams, self._host_costs = streams, host_costs
        self._known: dict[tuple[str, int, tuple[int, ...], bool], CollectiveCost] = {}
        self.guards: dict[int, Flight] = {}

    def issue(
        self,
        queue: Queue,
        ranks: tuple[int, ...],
        backend: str,
        kind: str,
        payload_bytes: int,
        tensors: Sequence[Tensor],
    ) -> Flight:
        """Issue a collective of a group.

        Args:
            ranks: Of the group, by their numbers in the whole world.
            backend: That carries it.
        """
        on_device = backend == self.cluster.backend
        cost = self._cost(kind, payload_bytes, ranks, on_device)
        ready_s = self._streams.current.reached_s if on_device else float("inf")
        flight = self.clock.issue(cost, queue, ready_s)
        self._on_issue(Issued(kind, payload_bytes, ranks, backend, flight), tensors)
        return flight

    def wait(self, flight: Flight) -> None:
        """What `Work.wait` does: make the current stream wait."""
        self._streams.current.hold(flight)

    def _cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...], on_device: bool) -> CollectiveCost:
        key = (kind, payload_bytes, ranks, on_device)
        if key not in self._known:
            costs = self._costs if on_device else self._host_costs
            alone = CollectiveCost(0.0, 0.0, "")
            self._known[key] = costs.cost(kind, payload_bytes, ranks) if len(ranks) > 1 else alone
        return self._known[key]


class PretendedWork(dist._Work):
    """The handle of a collective.

    Attributes:
        scratch: Tensors of the backend's own, which live as long as this.
    """

    def __init__(self, network: Network, flight: Flight, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._network, self.flight, self._outputs = network, flight, list(outputs)
        self.scratch: Sequence[Tensor] = ()

    def wait(self, timeout: timedelta = TIMEOUT) -> bool:
        self._network.wait(self.flight)
        return True

    def is_completed(self) -> bool:
        return self.flight.is_done

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Complete at once, since C++ code cannot be made to run the clock. Whoever touches the tensors before the
        collective is done waits then (`planner.simulation.operators`)."""
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


def nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def holds_data(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
