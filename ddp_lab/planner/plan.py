"""Every choice on a pretended cluster, side by side: does it fit, how long does a step take, what does it cost."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from ddp_lab.planner.choices import entrypoint_of, families_of
from ddp_lab.planner.contracts import Costs, Setting, Simulated
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.costs.sources import LINK_ERROR
from ddp_lab.planner.models import Model
from ddp_lab.planner.report.columns import PLAN_COLUMNS
from ddp_lab.planner.simulation.simulate import simulate
from ddp_lab.runtime.config import RunConfig, labelled
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh

GIB = 2**30
CONTEXT_BYTES = {"cuda": GIB, "cpu": 0}
"""What a device holds besides tensors: CUDA's context, kernels, workspaces and NCCL's channels; assumed."""


@dataclass(frozen=True)
class Case:
    """What is to be trained, how, and on what.

    Attributes:
        config: Batch, accumulation, precision, buckets, clipping and mesh, as the runner takes them.
        sequence_length: Tokens of a sample, padding included.
        price: Of one device for an hour, in any currency; None if it is not known.
    """

    model: Model
    cluster: Cluster
    config: RunConfig
    sequence_length: int
    costs: Costs
    price: float | None = None

    @property
    def mesh(self) -> Mesh | None:
        return Mesh.parse(self.config.mesh) if self.config.mesh else None

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch of one rank.

        Raises:
            UserError: the global batch does not divide.
        """
        return self.config.micro_batch_size(self.mesh.data_size if self.mesh else self.cluster.world_size)

    @property
    def usable_bytes(self) -> int:
        """What tensors of one rank may take."""
        return self.cluster.device.memory_bytes - CONTEXT_BYTES[self.cluster.device.kind]

    def setting(self, choice: str) -> Setting:
        """What the simulator runs."""
        count, size = self.config.grad_accum_steps, self.micro_batch_size
        config = replace(self.config, choice=choice)
        return Setting(config, self.model.build, lambda: self.model.micro_batches(count, size, self.sequence_length))


@dataclass(frozen=True)
class Outcome:
    """The result of one choice.

    Attributes:
        simulated: None if it cannot be simulated.
        reason: Why not.
        mesh: None without one.
    """

    choice: str
    simulated: Simulated | None
    reason: str = ""
    mesh: Mesh | None = None

    @property
    def name(self) -> str:
        """As folders of runs are called: `zero2@dp2-tp2`."""
        return labelled(self.choice, self.mesh.label if self.mesh else None)


# Simulating -----------------------------------------------------------------------------------------------------------


def outcome(case: Case, choice: str) -> Outcome:
    """Simulate one choice. If it cannot be simulated, the outcome has a reason."""
    mesh = case.mesh
    missing = families_of(mesh)[entrypoint_of(choice, mesh)].missing
    if choice in missing:
        return Outcome(choice, None, f"not installed; run: {missing[choice]}", mesh)
    try:
        return Outcome(choice, simulate(case.setting(choice), case.cluster, case.costs), mesh=mesh)
    except UserError as error:
        return Outcome(choice, None, str(error), mesh)


def outcomes(tasks: Sequence[tuple[Case, str]], jobs: int | None = None) -> Iterator[Outcome]:
    """The outcome of each case and choice, in their order.

    Args:
        jobs: Simulations at a time, in processes of their own; 1: in this process. None: one for each core.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(tasks))
    if jobs <= 1:
        yield from (outcome(*task) for task in tasks)
        return
    # Forked, since a fresh process would load torch and transformers again, for longer than most simulations take.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(outcome, *zip(*tasks, strict=True))


# The table ------------------------------------------------------------------------------------------------------------


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


def row(outcome: Outcome, case: Case) -> dict[str, Any]:
    """The `name` of a choice, and what the table says of it; columns as `report.columns.PLAN_COLUMNS` explains
    them."""
    mesh, choice = outcome.mesh, outcome.choice
    of_choice: dict[str, Any] = {"name": outcome.name, "choice": choice, "entrypoint": entrypoint_of(choice, mesh)}
    if mesh is not None:
        of_choice["mesh"] = str(mesh)
    simulated = outcome.simulated
    if simulated is None:
        return {**of_choice, "fits": "unknown", "note": outcome.reason}
    memory, step_s = simulated.memory, simulated.step_time_s
    low, high = interval(simulated, case.costs)
    batch = case.config.global_batch_size
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
        "samples_per_second": batch / step_s,
        "exposed_ms": simulated.exposed_s * 1e3,
        "exposed_pct": 100 * simulated.exposed_s / step_s,
        "note": "; ".join(notes),
    }
    if case.model.kind == "tokens":
        values["tokens_per_second"] = batch * case.sequence_length / step_s
    if case.price is not None:
        values["cost_per_million_samples"] = case.price * case.cluster.world_size * step_s / batch * 1e6 / 3600
    return of_choice | values


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

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [row(outcome, self.case) for outcome in self.outcomes]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The table, with those of `PLAN_COLUMNS` that have any value."""
        frame = pd.DataFrame(self.rows)
        return frame[[name for name in PLAN_COLUMNS if name in frame]]
