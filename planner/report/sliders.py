"""Other settings than the planned one, simulated in advance for the sliders of the page."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.contracts import Simulated
from planner.costs.cluster import Cluster, Link
from planner.plan import Case, Plan, outcome, outcomes
from planner.report.recommendation import contenders

AXES = ("ranks", "link", "micro_batch_size", "grad_accum_steps")
LINK_FACTORS = (0.25, 1.0, 4.0)
MOST_RANKS = 4096
Figures = tuple[float, int, float] | None
"""Of one choice: milliseconds a step, bytes at the peak, exposed milliseconds; None if it cannot be simulated."""
Place = tuple[int, ...]
"""A setting: the index of its value on each axis."""


@dataclass(frozen=True)
class Grid:
    """Simulated settings.

    Attributes:
        axes: Values of each axis, in order; `link` as factors on the planned rate.
        base: The planned setting.
        choices: Those that the sliders compare.
        cells: Figures of the choices, for each setting that was simulated.
        wanted: Settings that a whole grid has.
    """

    axes: Mapping[str, Sequence[float]]
    base: Place
    choices: Sequence[str]
    cells: Mapping[Place, Sequence[Figures]]
    wanted: int


def fill(plan: Plan, budget_s: float, jobs: int | None = None) -> Grid | None:
    """Simulate settings around the planned one, with the recommended choice, the fastest, and the one with the smallest
    peak. Settings that differ in few respects come first, until time is up. None: no choice could be simulated.

    Args:
        budget_s: In seconds. The setting that has begun is finished.
        jobs: Simulations at a time; None: one for each core.
    """
    choices = contenders(plan.rows)
    if not choices or not budget_s:
        return None
    began, axes = time.perf_counter(), axes_of(plan.case)
    base = tuple(axes[axis].index(value) for axis, value in zip(AXES, values_of(plan.case), strict=True))
    simulated = {each.choice: each.simulated for each in plan.outcomes}
    cells: dict[Place, list[Figures]] = {base: [figures_of(simulated[name]) for name in choices]}
    places = list(itertools.product(*(range(len(axes[axis])) for axis in AXES)))
    for place in sorted(places, key=lambda place: distance(place, base))[1:]:
        if time.perf_counter() - began >= budget_s:
            break
        case = changed(plan.case, [axes[axis][at] for axis, at in zip(AXES, place, strict=True)])
        cells[place] = list(outcomes([(case, name) for name in choices], jobs, figures))
    return Grid(axes, base, choices, cells, len(places))


def figures(case: Case, choice: str) -> Figures:
    """What a process simulates and answers for one choice."""
    return figures_of(outcome(case, choice).simulated)


def figures_of(simulated: Simulated | None) -> Figures:
    if simulated is None:
        return None
    return simulated.step_time_s * 1e3, simulated.memory.peak_bytes, simulated.exposed_s * 1e3


def axes_of(case: Case) -> dict[str, list[float]]:
    """Values around those of `case`, which are among them."""
    cluster, size = case.cluster, case.micro_batch_size
    accumulation = case.config.grad_accum_steps
    unit = cluster.ranks_per_node if cluster.nodes > 1 else 1
    units, most = cluster.world_size // unit, MOST_RANKS // unit
    numbers = {max(1, units // 2), units, max(units, min(2 * units, most))}
    return {
        "ranks": sorted(unit * number for number in numbers),
        "link": list(LINK_FACTORS),
        "micro_batch_size": sorted({max(1, size // 2), size, 2 * size}),
        "grad_accum_steps": sorted({1, accumulation, 2 * accumulation}),
    }


def values_of(case: Case) -> Iterator[float]:
    yield case.cluster.world_size
    yield 1.0
    yield case.micro_batch_size
    yield case.config.grad_accum_steps


def distance(place: Place, base: Place) -> tuple[int, int]:
    """In how many respects two settings differ, and by how many steps."""
    steps = [abs(mine - other) for mine, other in zip(place, base, strict=True)]
    return sum(map(bool, steps)), sum(steps)


def changed(case: Case, values: Sequence[float]) -> Case:
    """`case` with these values of `AXES`."""
    ranks, factor, size, accumulation = values
    cluster = resized(case.cluster, int(ranks))
    between = cluster.between and scaled(cluster.between, factor)
    config = replace(
        case.config, global_batch_size=int(size * accumulation * ranks), grad_accum_steps=int(accumulation)
    )
    return replace(
        case, cluster=replace(cluster, inside=scaled(cluster.inside, factor), between=between), config=config
    )


def resized(cluster: Cluster, ranks: int) -> Cluster:
    """A cluster of so many ranks: whole nodes where there are several, one node otherwise. Ranks on one processor share
    its memory."""
    if cluster.nodes > 1:
        nodes = ranks // cluster.ranks_per_node
        return replace(cluster, nodes=nodes, between=cluster.between if nodes > 1 else None)
    device = cluster.device
    if device.kind == "cpu":
        device = replace(device, memory_bytes=device.memory_bytes * cluster.ranks_per_node // ranks)
    return replace(cluster, device=device, ranks_per_node=ranks)


def scaled(link: Link, factor: float) -> Link:
    if factor == 1:
        return link
    return replace(link, name=f"{link.name} x {factor:g}", bytes_per_s=link.bytes_per_s * factor)
