"""Process groups that only pretend: no data moves, but each collective takes its time on a clock."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ddp_lab.collectives.kinds import MESSAGE
from ddp_lab.planner.contracts import CollectiveCost, CollectiveCosts, OperatorCall
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.simulation.clock import Clock, Flight, Queue
from ddp_lab.pretended.device import Streams
from ddp_lab.pretended.group import Fill, Group, Work
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.loop import StepFollower

AT_ONCE = {"gloo": 2, "nccl": 1}
"""Collectives of one group that run at once: Gloo has two threads for each group, NCCL one stream."""


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
        on_issue: Called with each collective when it is issued, and the tensors that it reads and writes.
        guards: Collectives in flight that C++ code waits for, by storage (`UntypedStorage._cdata`).
    """

    cluster: Cluster
    costs: Mapping[str, CollectiveCosts]
    clock: Clock
    streams: Streams
    on_issue: Callable[[Issued, Sequence[Tensor]], None]
    guards: dict[int, Flight] = field(default_factory=dict)


class TimedWork(Work):
    """The handle of a collective.

    Attributes:
        scratch: Tensors of the backend's own, which live as long as this.
        tells: Whether one can ask if it is done. A send over Gloo says so only when it was waited for (torch 2.15).
    """

    def __init__(self, network: Network, flight: Flight, outputs: Sequence[Tensor]) -> None:
        super().__init__(network.streams, (0.0, [flight]), outputs)
        self._guards, self.flight = network.guards, flight
        self.scratch: Sequence[Tensor] = ()
        self.tells = True

    def is_completed(self) -> bool:
        return self.tells and self.flight.is_done

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Complete at once, since C++ code cannot be made to run the clock. Whoever touches the tensors before the
        collective is done waits then (`ddp_lab.planner.simulation.operators`)."""
        for tensor in self._outputs:
            self._guards[tensor.untyped_storage()._cdata] = self.flight
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


class TimedGroup(Group):
    """A group whose collectives take their time on the clock. Tensors without data stay so.

    Ranks of a pipeline are not symmetric (`side_by_side`).
    """

    def __init__(self, shared: Network, ranks: Sequence[int], rank: int, config: str, name: str) -> None:
        super().__init__(shared, ranks, rank, config, name)
        self._queues: dict[str, Queue] = {}
        self._count = 0

    def _issue(
        self, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], fill: Fill, opts: Any = None
    ) -> TimedWork:
        network, tensors = self.shared, [*inputs, *outputs]
        if all(map(holds_data, tensors)):
            fill(outputs)
        # Beside NCCL, Gloo carries what lies in host memory
        backend = "gloo" if tensors and holds_data(tensors[0]) else network.cluster.backend
        scratch = scratch_of_gloo(kind, inputs, outputs) if backend == "gloo" else []
        # Its payload and cost
        parts = len(self.ranks) if kind in ("scatter", "reduce_scatter") else 1  # of which this rank receives one
        payload = parts * sum(tensor.nbytes for tensor in outputs or inputs)
        is_message, cost = kind in ("send", "receive"), CollectiveCost(0.0, 0.0, "")
        if len(self.ranks) > 1:
            cost = network.costs[backend].cost(MESSAGE if is_message else kind, payload, self.ranks)
        # Its place in the queue
        queue = self._queues.setdefault(backend, Queue(AT_ONCE[backend]))
        ready_s, self._count = float("inf"), self._count + 1
        if backend == network.cluster.backend:
            ready_s, _ = network.streams.current.point()
        flight = network.clock.issue(cost, queue, ready_s, (self._name, self._count))
        issued = Issued(MESSAGE if is_message else kind, payload, self.ranks, backend, flight)
        network.on_issue(issued, [*tensors, *scratch])
        work = TimedWork(network, flight, outputs)
        work.scratch = scratch if kind == "reduce_scatter" else ()
        work.tells = kind != "send" or backend != "gloo"
        return work


def scratch_of_gloo(kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """A flat tensor that Gloo makes (torch 2.15): of what a scatter's root sends, and of what an all-gather receives,
    both freed before it is done; and for a reduce-scatter, which is an all-reduce of a copy."""
    parts = {"all_gather": outputs, "scatter": inputs, "reduce_scatter": inputs}.get(kind)
    if not parts or holds_data(parts[0]):
        return []
    return [torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)]
