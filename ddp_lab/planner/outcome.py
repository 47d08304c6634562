"""One case of a space, simulated: a step of many micro-batches or layers is composed of steps of fewer."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ddp_lab.planner.contracts import MemoryCurve, Simulated
from ddp_lab.planner.model import alike_layers
from ddp_lab.planner.simulation.simulate import simulate
from ddp_lab.planner.space import GIB, REGISTRIES, Case
from ddp_lab.runtime.errors import UserError

FEW = (2, 3)
"""Micro-batches of the steps that are simulated instead of one of many: from the second on, each takes what the one
before took."""
FEW_LAYERS = (4, 6)
"""Layers of the models that are simulated instead of a deep one."""
ACROSS_LAYERS = ("pytorch_ddp", "pytorch_ddp_plain", "pytorch_zero1")
"""Choices whose buckets, or parts of ranks, have parameters of several layers."""
LARGE_LAYER = 2**23
"""Parameters of a layer, of smaller ones of which a bucket holds many."""
STEADY = 0.01
"""Of what further layers take: by so much less may be exposed with them."""


@dataclass(frozen=True)
class CaseOutcome:
    """The result of one case.

    Attributes:
        simulated: None if it cannot be simulated.
        reason: Why not.
    """

    case: Case
    simulated: Simulated | None
    reason: str = ""

    @property
    def step_s(self) -> float:
        return self.simulated.step_time_s if self.simulated else float("inf")

    @property
    def peak_bytes(self) -> float:
        return self.simulated.memory.peak_bytes if self.simulated else float("inf")

    @property
    def spare_bytes(self) -> float:
        return self.case.usable_bytes - self.peak_bytes

    @property
    def gist(self) -> str:
        """What is known of it as soon as it is simulated."""
        return f"{self.step_s * 1e3:.1f} ms, peak {self.peak_bytes / GIB:.2f} GiB" if self.simulated else self.reason

    def fits(self, free: float = 0.0) -> bool:
        """Whether it leaves so large a share of the memory free."""
        return self.peak_bytes <= (1 - free) * self.case.usable_bytes


def simulate_step(case: Case) -> Simulated:
    """As `simulate`, but a step of many micro-batches, or of a model of many layers, is composed of two of fewer: times
    and memory grow by the same for each (tests hold that to the step itself). Pipelines are simulated as they are, and
    so is what torch cuts regardless of layers."""
    config, layers = case.config, alike_layers(case.model)
    if config.has_stages:
        return simulate(case.setting, case.cluster, case.costs)
    if config.grad_accum_steps > sum(FEW):
        samples = config.global_batch_size // config.grad_accum_steps
        low, high = (
            simulate_step(case.but(global_batch_size=samples * count, grad_accum_steps=count)) for count in FEW
        )
        return extrapolated(low, high, (config.grad_accum_steps - FEW[0]) / (FEW[1] - FEW[0]))
    is_deep = layers > 2 * max(FEW_LAYERS) and case.model.elements() > layers * LARGE_LAYER
    if is_deep and config.choice not in ACROSS_LAYERS:
        low, high = (simulate_step(replace(case, model=case.model.of_layers(count))) for count in FEW_LAYERS)
        # Where layers hide what the embedding sends, they do not all take the same.
        if low.exposed_s - high.exposed_s <= STEADY * (high.step_time_s - low.step_time_s):
            return extrapolated(low, high, (layers - FEW_LAYERS[0]) / (FEW_LAYERS[1] - FEW_LAYERS[0]), parts=True)
    return simulate(case.setting, case.cluster, case.costs)


def extrapolated(low: Simulated, high: Simulated, times: float, parts: bool = False) -> Simulated:
    """`low`, and so many times what `high` has more. `parts`: another part of the step than in these may hold most.
    Otherwise a peak grows by what is held at rest."""

    def grown(before: float, after: float) -> float:
        return before + times * (after - before)

    def of_components(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
        return {name: round(grown(before.get(name, 0), size)) for name, size in after.items()}

    low_memory, high_memory = low.memory, high.memory
    at_rest = of_components(low_memory.at_rest, high_memory.at_rest)
    at_peak = {
        name: component_bytes + at_rest[name] - high_memory.at_rest[name]
        for name, component_bytes in high_memory.at_peak.items()
    }
    if parts:
        peaks = [
            of_components(low_memory.peaks[part], high_memory.peaks[part])
            for part in low_memory.peaks.keys() & high_memory.peaks.keys()
        ]
        at_peak = max(peaks, key=lambda component_bytes: sum(component_bytes.values()))
    memory = MemoryCurve(at_rest, at_peak)
    return Simulated(
        grown(low.step_time_s, high.step_time_s),
        grown(low.compute_s, high.compute_s),
        grown(low.communication_s, high.communication_s),
        grown(low.exposed_s, high.exposed_s),
        memory,
        high.without_costs,
    )


def outcome(case: Case) -> CaseOutcome:
    """Simulate one case. If it cannot be simulated, the outcome has a reason."""
    missing = REGISTRIES[case.entrypoint].missing
    if case.config.choice in missing:
        return CaseOutcome(case, None, f"not installed; run: {missing[case.config.choice]}")
    try:
        return CaseOutcome(case, simulate_step(case))
    except UserError as error:
        return CaseOutcome(case, None, str(error))


Simulate = Callable[[Sequence[Case]], Iterator[CaseOutcome]]
"""Gives the outcome of each case, in their order."""


@contextmanager
def simulating(jobs: int | None) -> Iterator[Simulate]:
    """A function that gives the outcomes of cases by so many processes, which stay for further calls. None: one for
    each core; 1: in this process."""
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        yield lambda cases: map(outcome, cases)
        return
    # Forked, since a fresh process would load torch and transformers again, for longer than most simulations take. With
    # one thread: those that this process may have started for its own operators are not there after a fork.
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, forked, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield lambda cases: pool.map(outcome, cases)
