"""Every choice on a pretended cluster, side by side: does it fit, how long does a step take, what does it cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

import ddp
import sharding
from planner.cluster import Cluster, Device
from planner.columns import PLAN_COLUMNS
from planner.contracts import CollectiveCosts, ContentionBySize, OperatorCosts, Setting, Simulated
from planner.models import Model
from planner.recorded import RecordedCosts
from training.cli import unknown_name
from training.config import RunConfig
from training.errors import UserError
from training.registry import Registry

FAMILIES: Mapping[str, Registry] = {"main_ddp.py": ddp.REGISTRY, "main_shard.py": sharding.REGISTRY}
"""Choices by the entrypoint that trains with them."""
GIB = 2**30
CONTEXT_BYTES = {"cuda": GIB, "cpu": 0}
"""What a device holds besides tensors: CUDA's context, kernels, workspaces and NCCL's channels; assumed."""


@dataclass(frozen=True)
class Costs:
    """What operators and collectives are taken to cost, and how far that may be off.

    Attributes:
        compute_error: Relative, of the time of operators.
        link_error: The same of collectives.
        sources: Where the figures are from, a sentence each.
        record: That operators are taken from, if any.
    """

    operators: OperatorCosts
    collectives: CollectiveCosts
    contention: ContentionBySize
    compute_error: float
    link_error: float
    sources: Sequence[str] = ()
    record: RecordedCosts | None = None


@dataclass(frozen=True)
class Knowledge:
    """What is known of devices and links besides tables.

    Attributes:
        record: File of `scripts/plan.py record`.
        collectives: JSON file of `scripts/bench_collectives.py`.
        contention: File of `benchmarks/contention.py`.
        rescale: Whether the first two may be from another device, precision or number of ranks.
        efficiency: Part of peak rates that operators reach where there is no record; None: what the table assumes.
        straggler: How many times as long as the others one rank computes. All wait for it, so it is the simulated one.
    """

    record: Path | None = None
    collectives: Path | None = None
    contention: Path | None = None
    rescale: bool = False
    efficiency: float | None = None
    straggler: float = 1.0


@dataclass(frozen=True)
class Case:
    """What is to be trained, how, and on what.

    Attributes:
        config: Batch, accumulation, precision, buckets and clipping, as the runner takes them.
        sequence_length: Tokens of a sample, padding included.
        longest: The same of the rank with the longest samples, which all wait for, so it is the simulated one.
        price: Of one device for an hour, in any currency; None if nobody said.
    """

    model: Model
    cluster: Cluster
    config: RunConfig
    sequence_length: int
    longest: int
    price: float | None = None
    knowledge: Knowledge = Knowledge()

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch of one rank.

        Raises:
            UserError: the global batch does not divide.
        """
        return self.config.micro_batch_size(self.cluster.world_size)

    @property
    def tokens(self) -> float:
        """Of all samples of a step, padding included."""
        ranks = self.cluster.world_size
        return self.config.global_batch_size * (self.longest + (ranks - 1) * self.sequence_length) / ranks

    @property
    def usable_bytes(self) -> int:
        """What tensors of one rank may take."""
        return self.cluster.device.memory_bytes - CONTEXT_BYTES[self.cluster.device.kind]

    def setting(self, choice: str) -> Setting:
        """What the simulator is asked for."""
        micro_batch_size = self.micro_batch_size
        return Setting(
            choice,
            make_module=self.model.build,
            make_micro_batches=lambda: self.model.micro_batches(
                self.config.grad_accum_steps, micro_batch_size, self.longest
            ),
            make_optimizer=adamw,
            options=self.config.strategy_options(),
            clip_grad_norm=self.config.clip_grad_norm,
        )


@dataclass(frozen=True)
class Outcome:
    """What became of one choice.

    Attributes:
        simulated: None where it cannot be simulated.
        reason: Why not.
    """

    choice: str
    simulated: Simulated | None
    reason: str = ""


Simulate = Callable[[Setting], Simulated]


def adamw(parameters: Any) -> Any:
    """The optimizer of the runner (`training.run`)."""
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def choices(asked: Sequence[str] | None = None) -> list[str]:
    """All choices of both families in display order, or those of them that are asked for.

    Raises:
        UserError: one does not exist.
    """
    known = [name for registry in FAMILIES.values() for name in registry.sentences]
    for name in asked or ():
        if name not in known:
            raise UserError(f"--choices: {unknown_name('strategy', name, known)}")
    return [name for name in known if not asked or name in asked]


def distinct(names: Sequence[str]) -> dict[str, str]:
    """Each of these choices with the first of them that is the same class: `baseline` is `bucket_ddp_async`."""
    first: dict[str, str] = {}
    locations = {name: registry.location(name) for registry in FAMILIES.values() for name in registry.sentences}
    return {name: first.setdefault(locations[name], name) for name in names}


def entrypoint_of(choice: str) -> str:
    return next(entrypoint for entrypoint, registry in FAMILIES.items() if choice in registry.sentences)


def outcome(case: Case, choice: str, simulate: Simulate) -> Outcome:
    """What becomes of one choice."""
    registry = FAMILIES[entrypoint_of(choice)]
    if choice in registry.missing:
        return Outcome(choice, None, f"not installed; run: {registry.missing[choice]}")
    try:
        return Outcome(choice, simulate(case.setting(choice)))
    except UserError as error:
        return Outcome(choice, None, str(error))


def interval(simulated: Simulated, costs: Costs) -> tuple[float, float]:
    """Bounds in seconds of the step time, if operators are off by no more than `compute_error` and collectives by no
    more than `link_error`.

    A step is a longest chain of operators and collectives. Such a length grows in proportion where all of them do, and
    two sets of durations added up never give a longer chain than both chains together. So it is off by no more than the
    smaller error's share of the step, and the difference of both errors' share of what it applies to: all computing, or
    all communication.
    """
    compute, link, step = costs.compute_error, costs.link_error, simulated.step_time_s
    wider = simulated.communication_s if link > compute else simulated.compute_s
    half = min(compute, link) * step + abs(link - compute) * min(wider, step)
    return step - half, step + half


def row(outcome: Outcome, case: Case, costs: Costs) -> dict[str, Any]:
    """What the table says of a choice; columns as `planner.columns.PLAN_COLUMNS` explains them."""
    of_choice: dict[str, Any] = {"choice": outcome.choice, "entrypoint": entrypoint_of(outcome.choice)}
    simulated = outcome.simulated
    if simulated is None:
        return {**of_choice, "fits": "unknown", "remark": outcome.reason}
    memory, step_s = simulated.memory, simulated.step_time_s
    low, high = interval(simulated, costs)
    batch = case.config.global_batch_size
    spare = case.usable_bytes - memory.peak_bytes
    values = {
        "fits": "yes" if spare >= 0 else "no",
        "spare_bytes": spare,
        "peak_bytes": memory.peak_bytes,
        **{f"peak_{component}_bytes": held for component, held in memory.at_peak.items()},
        "resting_bytes": sum(memory.at_rest.values()),
        "step_time_ms": step_s * 1e3,
        "step_time_low_ms": low * 1e3,
        "step_time_high_ms": high * 1e3,
        "samples_per_second": batch / step_s,
        "exposed_ms": simulated.exposed_s * 1e3,
        "exposed_pct": 100 * simulated.exposed_s / step_s,
        "simulation_s": simulated.wall_s,
        "remark": without_costs(simulated, case.cluster.device),
    }
    if case.model.kind == "tokens":
        values["tokens_per_second"] = case.tokens / step_s
    if case.price is not None:
        values["cost_per_million_samples"] = case.price * case.cluster.world_size * step_s / batch * 1e6 / 3600
    return of_choice | values


@dataclass(frozen=True)
class Plan:
    """A case with what became of every choice."""

    case: Case
    costs: Costs
    outcomes: Sequence[Outcome]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [row(outcome, self.case, self.costs) for outcome in self.outcomes]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The table, with those of `PLAN_COLUMNS` that have any value."""
        frame = pd.DataFrame(self.rows)
        return frame[[name for name in PLAN_COLUMNS if name in frame]]


def without_costs(simulated: Simulated, device: Device) -> str:
    """Which operators nothing is known of, that they count as taking no time, and what of the step they would take if
    they did nothing but move their bytes at the device's rate."""
    if not simulated.without_costs:
        return ""
    seconds = {name: moved / device.bytes_per_s for name, (_, moved) in simulated.without_costs.items()}
    most = sorted(seconds, key=lambda name: -seconds[name])
    names = ", ".join(f"{name} ({simulated.without_costs[name][0]}x)" for name in most[:3])
    more = f" and {len(most) - 3} more" if len(most) > 3 else ""
    missing_s = sum(seconds.values())
    share = missing_s / (missing_s + simulated.step_time_s)
    return (
        f"no cost known, taken as 0: {names}{more}; to move their bytes alone takes {missing_s * 1e3:.3g} ms, "
        f"{share:.1%} of the step"
    )
