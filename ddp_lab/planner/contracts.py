"""What the simulator needs from those who know costs, and what it answers with."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ddp_lab.runtime.config import RunConfig

if TYPE_CHECKING:  # a mistake in a cluster is found before torch is loaded
    from torch import nn

    from ddp_lab.strategy.batches import MicroBatch

MODEL_STATES = ("parameters", "gradients", "optimizer_state")
COMPONENTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer states",
    "activations": "activations",
    "communication": "communication",
    "other": "other",
}
"""Components of memory, with labels. Every byte of a rank counts as one of them."""


CONTIGUOUS = "contiguous"
"""All large tensors have one dense layout."""
SCATTERED = "scattered"
"""Broadcast, strided, or reduced along a dimension: one element at a time."""
ROWS = "rows"
"""Normalizes rows in one kernel, which reads them more than once."""
DERIVATIVE = "derivative"
"""Of an activation function: more arithmetic than bytes."""
OPTIMIZER = "optimizer"
"""A fused update of many tensors."""
CAUSAL = "causal"
"""Attention to earlier positions alone, which needs half of the arithmetic that torch counts."""
ACCESSES = (CONTIGUOUS, SCATTERED, ROWS, DERIVATIVE, OPTIMIZER)
"""How operators reach memory that are timed by it."""


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator, as the dispatcher sees it.

    Attributes:
        name: As in `aten.mm.default`.
        shapes: Of its tensor arguments, in order.
        dtypes: Of the same, without `torch.`: `float32`.
        flops: Floating-point operations by `torch.utils.flop_counter`; 0 where it knows none.
        bytes_moved: Bytes of all tensors read and of all written. A tensor that is changed in place counts twice.
        access: How it reaches memory: one of `ACCESSES`, or `CAUSAL`.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    flops: int
    bytes_moved: int
    access: str = "contiguous"


class OperatorCosts(Protocol):
    """How long operators take on one device that does nothing else."""

    def seconds(self, call: OperatorCall) -> float | None:
        """None if nothing is known of this operator."""
        ...


@dataclass(frozen=True)
class CollectiveCost:
    """How long a collective takes that has its link to itself: `latency_s + transfer_s`.

    Attributes:
        latency_s: Passes side by side with everything else.
        transfer_s: Shares its link: if the shares of all transfers on a link add up to more than 1, each advances at
            1 / (sum of shares) of its own pace.
        link: Name of the link it uses.
        share: Part of the link that it keeps busy while alone. An all-reduce uses every rank's sending and receiving
            side all the time: 1. A broadcast between two ranks uses one of two directions: 0.5, so that two from
            different roots do not disturb each other.
        slowing: Part of `Costs.contention` by which it slows compute.
    """

    latency_s: float
    transfer_s: float
    link: str
    share: float = 1.0
    slowing: float = 1.0


class CollectiveCosts(Protocol):
    """How long collectives take on a cluster."""

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        """Cost of one collective among `ranks` (numbers in the whole world). `kind`: a key of
        `ddp_lab.collectives.kinds.LABELS`. `payload_bytes`: as `ddp_lab.strategy.account.Collective` counts them."""
        ...


@dataclass(frozen=True)
class Costs:
    """What operators and collectives take, and how far that may be off.

    Attributes:
        contention: How many times as long compute takes while a collective is in flight in a node; at least 1.
        compute_error: Largest relative error of the time of operators.
        sources: Where the figures come from, a sentence each.
        host_s: What the host takes to issue an operator, while the device computes.
    """

    operators: OperatorCosts
    collectives: CollectiveCosts
    contention: float = 1.0
    compute_error: float = 0.0
    sources: tuple[str, ...] = ()
    host_s: float = 0.0


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    Attributes:
        config: Choice, options of the strategy and clipping, as the runner takes them.
        make_module: Makes the model; called where tensors hold no data.
        make_micro_batches: Makes one rank's micro-batches of one optimizer step. Called where tensors hold data, so
            that a model may look for padding.
    """

    config: RunConfig
    make_module: "Callable[[], nn.Module]"
    make_micro_batches: "Callable[[], Sequence[MicroBatch]]"


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes that the simulated rank holds, by component (`COMPONENTS`).

    Attributes:
        at_rest: Between two steps.
        at_peak: When the sum is largest.
        peaks: The same within each part of the step: a phase, or what follows one parameter's gradient.
    """

    at_rest: Mapping[str, int]
    at_peak: Mapping[str, int]
    peaks: Mapping[Hashable, Mapping[str, int]] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class Simulated:
    """One optimizer step of one rank, after the steps that the strategy needs to settle.

    Attributes:
        compute_s: Time in which the rank computes.
        communication_s: Time in which any collective is in flight.
        exposed_s: Time in which the rank only waits for collectives.
        without_costs: Operators of which nothing is known, with the number of calls. They take no time.
        largest: The place in its pipeline of the rank whose memory this is.
    """

    step_time_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    memory: MemoryCurve
    without_costs: Mapping[str, int]
    largest: int | None = None
