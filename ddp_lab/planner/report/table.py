"""The table of a plan: a row for each outcome."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from ddp_lab.analysis.metrics.utilization import dtype_of
from ddp_lab.planner.choices import entrypoint_of
from ddp_lab.planner.contracts import Costs, Simulated
from ddp_lab.planner.costs.sources import LINK_ERROR
from ddp_lab.planner.plan import Case, Outcome
from ddp_lab.planner.rates import flops_of_a_sample
from ddp_lab.planner.report.columns import PLAN_COLUMNS

HOUR_S = 3600


def interval(simulated: Simulated, costs: Costs) -> tuple[float, float]:
    """Bounds in seconds of the step time, if operators are off by no more than `compute_error` and collectives by no
    more than `LINK_ERROR`.

    A step is a longest chain of operators and collectives. If all of them grow by one factor, so does the step. If only
    operators grow, or only collectives, it grows by no more than all of them. So it is off by the smaller error's share
    of itself, and the difference of both errors' share of all compute, or of all communication.
    """
    compute, link, step = costs.compute_error, LINK_ERROR, simulated.step_time_s
    wider = simulated.communication_s if link > compute else simulated.compute_s
    half = min(compute, link) * step + abs(link - compute) * min(wider, step)
    return step - half, step + half


def row(outcome: Outcome, flops: float | None = None) -> dict[str, Any]:
    """The `name` of a choice, and what the table says of it; columns as `report.columns.PLAN_COLUMNS` explains
    them.

    Args:
        flops: What a sample takes (`rates.flops_of_a_sample`).
    """
    case, choice = outcome.case, outcome.choice
    mesh, config = case.mesh, case.config
    of_choice: dict[str, Any] = {"name": outcome.name, "choice": choice, "entrypoint": entrypoint_of(choice, mesh)}
    if mesh is not None:
        of_choice["mesh"] = str(mesh)
    of_choice |= {"micro_batch_size": case.micro_batch_size, "grad_accum_steps": config.grad_accum_steps}
    of_choice["activation_checkpointing"] = config.strategy.activation_checkpointing
    of_choice["compile"] = "yes" if config.strategy.compile_backend else "no"
    simulated = outcome.simulated
    if simulated is None:
        return {**of_choice, "fits": "unknown", "note": outcome.reason}
    memory, step_s = simulated.memory, simulated.step_time_s
    low, high = interval(simulated, case.costs)
    spare = case.usable_bytes - memory.peak_bytes
    unknown = ", ".join(f"{name} ({count}x)" for name, count in simulated.without_costs.items())
    notes = [f"no cost known, taken as 0: {unknown}"] * bool(unknown)
    if simulated.largest is not None:
        notes.append(f"rank {simulated.largest} of the pipeline holds most")
    values = {
        "fits": "yes" if spare >= 0 else "no",
        "spare_bytes": spare,
        "peak_bytes": memory.peak_bytes,
        **{f"peak_{component}_bytes": held for component, held in memory.at_peak.items()},
        "resting_bytes": sum(memory.at_rest.values()),
        "step_time_ms": step_s * 1e3,
        "step_time_low_ms": low * 1e3,
        "step_time_high_ms": high * 1e3,
        "exposed_ms": simulated.exposed_s * 1e3,
        "exposed_pct": 100 * simulated.exposed_s / step_s,
        "note": "; ".join(notes),
    }
    return of_choice | values | rates(case if spare >= 0 else replace(case, tokens=None), step_s, flops)


def rates(case: Case, step_s: float, flops: float | None) -> dict[str, float]:
    """What a step of so many seconds means in samples, tokens, use of the devices, and money."""
    devices, samples = case.cluster.world_size, case.config.global_batch_size / step_s
    found = {"samples_per_second": samples}
    a_second = None if case.price is None else case.price.amount * devices / HOUR_S
    tf32 = {"tf32": case.model.kind != "tokens"}  # as torch computes convolutions by default
    device = case.cluster.device
    peak = device.peak.get(dtype_of(case.config.as_dict() | tf32)) if device.kind == "cuda" else None
    if flops and peak:
        found["mfu_pct"] = 100 * flops * samples / (peak * devices)
    if case.model.kind != "tokens":
        return found | ({} if a_second is None else {"cost_per_million_samples": a_second / samples * 1e6})
    tokens = samples * case.sequence_length
    found |= {"tokens_per_second": tokens, "tokens_per_second_per_device": tokens / devices}
    if a_second is not None:
        found["cost_per_billion_tokens"] = a_second / tokens * 1e9
    if case.tokens is not None:
        found["training_hours"] = case.tokens / tokens / HOUR_S
        if a_second is not None:
            found["training_cost"] = case.tokens / tokens * a_second
    return found


@dataclass(frozen=True)
class Plan:
    """The outcome of every choice, on each mesh.

    Attributes:
        cases: One, or one for each mesh. They differ in nothing else.
        left_out: A line for each mesh that does not fit.
    """

    cases: Sequence[Case]
    outcomes: Sequence[Outcome]
    left_out: Sequence[str] = ()

    @property
    def case(self) -> Case:
        return self.cases[0]

    def case_of(self, mesh: object) -> Case:
        """The case on this mesh, or on the mesh of this name; None: without one."""
        return next(case for case in self.cases if case.config.mesh == (mesh and str(mesh)))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        flops = flops_of_a_sample(self.case.model, self.case.sequence_length)
        return [row(outcome, flops) for outcome in self.outcomes]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The table, with those of `PLAN_COLUMNS` that have any value."""
        return framed(self.rows)


def framed(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    return frame[[name for name in PLAN_COLUMNS if name in frame]]
