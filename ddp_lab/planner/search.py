"""The fastest settings of a fixed global batch that fit: choice, mesh, micro-batch, recomputation.

Best first, with a bound. A smaller micro-batch and more recomputation hold less and take longer. So a choice on a mesh
begins with its whole batch in one micro-batch and nothing computed again, which nothing leaner can beat, and is made
leaner one change at a time, while what it has reached promises more than `WORTH` of the best that fits. What formulas
say cannot fit is never simulated.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ddp_lab.planner.choices import choices
from ddp_lab.planner.coarse import least_bytes
from ddp_lab.planner.contracts import Simulated
from ddp_lab.planner.plan import Case, Outcome, Task
from ddp_lab.planner.report.recommendation import TIGHT
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.recompute.setting import NONE, OP, SELECTIVE

LEVELS = (NONE, SELECTIVE, OP, "block")
"""Recomputation, from the fastest and largest to the slowest and smallest."""
REPLICATED, SHARDED = ("bucket_ddp_async", "tp"), ("zero1", "zero2", "zero3")
SEARCHED = (*REPLICATED, *SHARDED)
"""Choices of a search that names none."""
WORTH = 0.9
"""Settings that are slower than this share of the best are not looked for."""
MOST = 150
"""Simulations of a search."""


@dataclass(frozen=True)
class Found:
    """A setting that was simulated."""

    case: Case
    outcome: Outcome

    @property
    def simulated(self) -> Simulated | None:
        return self.outcome.simulated

    @property
    def samples_per_second(self) -> float:
        return self.case.config.global_batch_size / self.simulated.step_time_s if self.simulated else 0.0

    def fits(self, free: float = 0.0) -> bool:
        """Whether it leaves so large a share of the memory free."""
        usable = self.case.usable_bytes
        return self.simulated is not None and self.simulated.memory.peak_bytes <= (1 - free) * usable


def roots(cases: Sequence[Case], wanted: Sequence[str], levels: Sequence[str]) -> Iterator[Task]:
    """Where a search begins: each choice on each mesh with the largest micro-batch and the first of the levels. With a
    pipeline, whose bubble grows with the micro-batch, each micro-batch.

    Args:
        cases: One for each mesh, whose accumulation is not chosen yet.
    """
    elements = cases[0].model.elements()
    for case in cases:
        config = case.config
        ranks = config.micro_batch_size(1) // case.micro_batch_size
        samples = case.micro_batch_size * config.grad_accum_steps
        steps = (
            [n for n in range(1, samples + 1) if samples % n == 0] if config.has_stages else [config.grad_accum_steps]
        )
        for name in choices(None, [case.mesh]):
            if (
                name not in wanted
                or (ranks == 1 and name in SHARDED)
                or least_bytes(case, name, elements) > case.usable_bytes
            ):
                continue
            for each in steps:
                yield with_settings(case, each, levels[0]), name


def with_settings(case: Case, steps: int, level: str) -> Case:
    return replace(case, config=case.config.but(grad_accum_steps=steps, activation_checkpointing=level))


def leaner(found: Found, levels: Sequence[str], any_steps: bool) -> Iterator[Task]:
    """What holds less, one change away: the next level, and the next smaller micro-batch that may fit.

    Of what does not fit, activations of a smaller micro-batch are at least its share of these, so that sizes with which
    these alone are too many are left out.
    """
    case, choice = found.case, found.outcome.choice
    config, micro = case.config, case.micro_batch_size
    for level in levels[levels.index(config.strategy.activation_checkpointing) + 1 :]:
        try:
            yield with_settings(case, config.grad_accum_steps, level), choice
            break
        except UserError:  # it does not go with another setting
            continue
    if not any_steps or config.has_stages or found.simulated is None:
        return
    memory = found.simulated.memory
    activations = memory.at_peak.get("activations", 0)
    for smaller in (size for size in range(micro - 1, 0, -1) if micro % size == 0):
        if found.fits() or memory.peak_bytes - activations * (1 - smaller / micro) <= case.usable_bytes:
            yield (
                with_settings(
                    case, config.grad_accum_steps * micro // smaller, config.strategy.activation_checkpointing
                ),
                choice,
            )
            return


def search(
    begin: Sequence[Task],
    simulate: Callable[[Sequence[Task]], Iterable[Outcome]],
    levels: Sequence[str],
    any_steps: bool,
    at_once: int,
) -> Iterator[Found]:
    """What was simulated, as it is found.

    Args:
        simulate: Gives the outcomes of so many tasks, in their order.
        any_steps: Accumulation may be chosen.
        at_once: Simulations that run side by side.
    """
    order = count()
    queue = [(-float("inf"), next(order), task) for task in begin]
    seen = {keyed(task) for task in begin}
    best, done = 0.0, 0
    while queue and done < MOST:
        bounds, tasks = list[float](), list[Task]()
        while queue and len(tasks) < at_once and -queue[0][0] > WORTH * best:
            bound, _, task = heapq.heappop(queue)
            bounds.append(bound)
            tasks.append(task)
        if not tasks:
            return
        for bound, (case, _), outcome in zip(bounds, tasks, simulate(tasks), strict=True):
            found, done = Found(case, outcome), done + 1
            yield found
            if found.fits(TIGHT):
                best = max(best, found.samples_per_second)
            for task in leaner(found, levels, any_steps):
                if keyed(task) not in seen:
                    seen.add(keyed(task))
                    heapq.heappush(queue, (-found.samples_per_second if found.simulated else bound, next(order), task))


def keyed(task: Task) -> tuple[object, ...]:
    config = task[0].config
    return task[1], config.mesh, config.grad_accum_steps, config.strategy.activation_checkpointing
