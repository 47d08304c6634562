"""What the simulator asks of those who know costs, and what it answers with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from training.config import StrategyOptions
from training.strategy import MicroBatch


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator, as the dispatcher sees it.

    Attributes:
        name: As in `aten.mm.default`.
        shapes: Of its tensor arguments, in order.
        dtypes: Of the same, without `torch.`: `float32`.
        flops: Floating-point operations by `torch.utils.flop_counter`; 0 where it knows none.
        bytes_moved: Bytes of all tensors read and of all written; of one that is changed in place, both.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    flops: int
    bytes_moved: int


class OperatorCosts(Protocol):
    """How long operators take on one device that does nothing else."""

    def seconds(self, call: OperatorCall) -> float | None:
        """None if nothing is known of this operator."""
        ...


@dataclass(frozen=True)
class CollectiveCost:
    """How long a collective takes that has its link to itself: `idle_s + latency_s + transfer_s`.

    Attributes:
        latency_s: Is drawn out by compute and by others of its queue at work, as far as `Contention` says.
        transfer_s: Is drawn out by others on the same link: those at once on it, whose shares add up to more than 1,
            each advance at 1 / (sum of shares) of their pace.
        link: Name of the link it uses.
        share: Part of the link that it keeps busy while alone. An all-reduce uses every rank's sending and receiving
            side all the time: 1. A broadcast between two ranks uses one of two directions: 0.5, so that two from
            different roots do not disturb each other.
        idle_s: In which it waits for what other ranks do: compute alone draws it out. It comes before the others.
    """

    latency_s: float
    transfer_s: float
    link: str
    share: float = 1.0
    idle_s: float = 0.0


class CollectiveCosts(Protocol):
    """How long collectives take on a cluster."""

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        """Of one collective among `ranks` (numbers in the whole world).

        Args:
            kind: As in `Collective`: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`,
                `reduce`, `all_to_all`, `send`, `barrier`, ...
            payload_bytes: As `training.communication.traffic.Collective` counts them.
        """
        ...


@dataclass(frozen=True)
class Contention:
    """What compute and communication take from each other while both are under way; 1 is nothing.

    Attributes:
        compute: Factor on the duration of compute while a collective is in flight.
        communication: Factor on the duration of a collective while the rank computes.
        hand_over_s: How long the rank's own thread is busy with handing a collective over.
        drift: Seconds by which a collective begins later than this rank issues it, since the last of the others is not
            there yet, after a second of compute since all were level. Ranks drift apart as random walks do: with the
            square root of that time.
        most_late: The last of the others is taken to be behind by at most this share of what the rank has computed.
        together: How many times as long as one that is waited for each of many collectives in flight takes, at least:
            two whose latencies pass side by side take as long as one, which is 0.5, but latencies may be work of the
            same cores.
    """

    compute: float = 1.0
    communication: float = 1.0
    hand_over_s: float = 0.0
    drift: float = 0.0
    together: float = 0.0
    most_late: float = 1.0

    def beside(self, payload_bytes: float) -> "Contention":
        """Itself: the same beside collectives of any payload."""
        return self


class ContentionBySize(Protocol):
    """What compute and collectives of any payload take from each other."""

    def beside(self, payload_bytes: float) -> Contention: ...


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    Attributes:
        choice: Name in `ddp.CHOICES` or `sharding.CHOICES`.
        make_module: Makes the model; called where tensors hold no data.
        make_micro_batches: One rank's micro-batches of one optimizer step; called where tensors hold data as always, so
            that a model may look for padding.
        make_optimizer: As `Strategy` takes it.
    """

    choice: str
    make_module: Callable[[], nn.Module]
    make_micro_batches: Callable[[], Sequence[MicroBatch]]
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    options: StrategyOptions = field(default_factory=StrategyOptions)
    clip_grad_norm: float | None = None


@dataclass(frozen=True)
class Span:
    """Something that took time on one lane of the simulated rank.

    Attributes:
        lane: `compute`; `communication` with a number, since several may be in flight at once; or `phase`, for the part
            of the step (forward, backward, ...) that the others lie in.
        start_s: From the beginning of the step.
        details: What is known of it: `phase`; of an operator its `call`; of a collective payload bytes, group size, ...
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes that the simulated rank holds, by component: `parameters`, `gradients`, `optimizer_state`, `activations`,
    `communication`, `other`.

    Attributes:
        at_rest: Between two steps.
        at_peak: When the sum is largest.
        points: Moment in seconds from the beginning of the step, and bytes by component, where they change.
    """

    at_rest: Mapping[str, int]
    at_peak: Mapping[str, int]
    points: Sequence[tuple[float, Mapping[str, int]]]

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class Simulated:
    """One optimizer step of one rank, after those that a strategy needs to settle.

    Attributes:
        compute_s: Time in which the rank computes.
        communication_s: Time in which any collective is in flight.
        exposed_s: Time in which the rank only waits for collectives.
        without_costs: Operators of which nothing is known, with the number of calls and the bytes that these move.
        wall_s: What the simulation itself took.
        reads_bucket_cap: Whether the choice asked how large its buckets may be.
    """

    step_time_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    spans: Sequence[Span]
    memory: MemoryCurve
    without_costs: Mapping[str, tuple[int, int]]
    wall_s: float
    reads_bucket_cap: bool = True
