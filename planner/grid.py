"""Other settings than the one that was asked for: a grid of them, simulated beforehand for the sliders of the page."""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.cluster import Cluster, Link
from planner.plan import Case, Outcome
from training.config import AUTO

AXES = ("ranks", "link", "micro_batch_size", "grad_accum_steps", "bucket_cap_mb")
LINK_FACTORS = (0.25, 1.0, 4.0)
BUCKETS = (1.0, 25.0, 100.0)
OWN = 0.0
"""Of the buckets: as each choice fills them by itself."""
MOST_RANKS = 4096
Figures = tuple[float, int, float] | None
"""Of one choice: milliseconds a step, bytes at the peak, exposed milliseconds; None if it cannot be simulated."""
Place = tuple[int, ...]
"""Numbers of values, one on each axis."""
Task = tuple[Place, str]
Simulations = Callable[[Iterable[tuple[Case, str]]], Iterator[Figures]]


@dataclass(frozen=True)
class Grid:
    """What was simulated.

    Attributes:
        axes: Values of each axis, in order; `link` as factors on the rate that was asked for.
        base: Place on each axis of the setting that was asked for.
        choices: Those that differ and can be simulated.
        cells: Figures of choices that are known there, by places on the axes.
        simulated: How many simulations that took, those of the plan itself left out.
        seconds: What it took.
        wanted: Cells that a whole grid has.
    """

    axes: Mapping[str, Sequence[float]]
    base: Place
    choices: Sequence[str]
    cells: Mapping[Place, Mapping[str, Figures]]
    simulated: int
    seconds: float
    wanted: int


def axes_of(case: Case) -> dict[str, list[float]]:
    """Values around those of `case`, which is among them. What was measured for so many ranks, or of one link, keeps
    those."""
    cluster, known, size = case.cluster, case.knowledge, case.micro_batch_size
    accumulation = case.config.grad_accum_steps
    unit = cluster.ranks_per_node if cluster.nodes > 1 else 1
    units, most = cluster.world_size // unit, MOST_RANKS // unit
    is_measured = known.contention or (known.collectives and not known.rescale)
    numbers = {units} if is_measured else {max(1, units // 2), units, max(units, min(2 * units, most))}
    return {
        "ranks": sorted(unit * number for number in numbers),
        "link": [1.0] if known.collectives else list(LINK_FACTORS),
        "micro_batch_size": sorted({max(1, size // 2), size, 2 * size}),
        "grad_accum_steps": sorted({1, accumulation, 2 * accumulation}),
        "bucket_cap_mb": sorted({*BUCKETS, bucket_of(case)}),
    }


def fill(
    case: Case,
    planned: Mapping[str, Figures],
    simulations: Simulations,
    budget_s: float,
    first: Collection[str] = (),
    without_buckets: Collection[str] = (),
) -> Grid:
    """Simulate settings around `case`, those that differ from it in few respects first, until time is up.

    Args:
        planned: Figures of each choice as `case` has it, known already.
        simulations: Answers tasks with their `figures`, in their order.
        budget_s: In seconds; what has begun is finished.
        first: Choices that go before the others in settings that differ in as many respects.
        without_buckets: Choices to which the size of buckets is nothing: one size stands for all.
    """
    began, axes = time.perf_counter(), axes_of(case)
    base = tuple(axes[axis].index(value) for axis, value in zip(AXES, values_of(case), strict=True))
    places = list(itertools.product(*(range(len(axes[axis])) for axis in AXES)))
    places.sort(key=lambda place: distance(place, base))

    def same(place: Place, choice: str) -> Task:
        return ((*place[:-1], base[-1]) if choice in without_buckets else place), choice

    asked = dict.fromkeys(same(place, choice) for place in places if place != base for choice in planned)
    ordered = [task for task in asked if task[0] != base]
    ordered.sort(key=lambda task: (distance(task[0], base)[0], task[1] not in first))

    def tasks() -> Iterator[tuple[Case, str]]:
        for place, choice in ordered:
            if time.perf_counter() - began >= budget_s:
                return
            yield changed(case, [axes[axis][at] for axis, at in zip(AXES, place, strict=True)]), choice

    answers = dict(zip(ordered, simulations(tasks()), strict=False))
    known = {(base, choice): of_choice for choice, of_choice in planned.items()} | answers
    cells = {}
    for place in places:
        found = {choice: known[same(place, choice)] for choice in planned if same(place, choice) in known}
        if found:
            cells[place] = found
    return Grid(axes, base, list(planned), cells, len(answers), time.perf_counter() - began, len(places))


def values_of(case: Case) -> Iterator[float]:
    yield case.cluster.world_size
    yield 1.0
    yield case.micro_batch_size
    yield case.config.grad_accum_steps
    yield bucket_of(case)


def bucket_of(case: Case) -> float:
    cap = case.config.bucket_cap_mb
    return OWN if isinstance(cap, str) else cap


def distance(place: Sequence[int], base: Sequence[int]) -> tuple[int, int]:
    """In how many respects two settings differ, and by how many steps."""
    steps = [abs(mine - other) for mine, other in zip(place, base, strict=True)]
    return sum(map(bool, steps)), sum(steps)


def changed(case: Case, values: Sequence[float]) -> Case:
    """`case` with these values of `AXES`."""
    ranks, factor, size, accumulation, bucket = values
    cluster = resized(case.cluster, int(ranks))
    between = cluster.between and scaled(cluster.between, factor)
    faster = replace(cluster, inside=scaled(cluster.inside, factor), between=between)
    config = replace(
        case.config,
        global_batch_size=int(size * accumulation * ranks),
        grad_accum_steps=int(accumulation),
        bucket_cap_mb=AUTO if bucket == OWN else bucket,
    )
    return replace(case, cluster=faster, config=config)


def resized(cluster: Cluster, ranks: int) -> Cluster:
    """A cluster of so many ranks: whole nodes where there are several, one node otherwise. Ranks of one machine's
    processor share its memory."""
    if cluster.nodes > 1:
        nodes = ranks // cluster.ranks_per_node
        return replace(cluster, nodes=nodes, between=cluster.between if nodes > 1 else None)
    device = cluster.device
    if device.kind == "cpu":
        device = replace(device, memory_bytes=device.memory_bytes * cluster.ranks_per_node // ranks)
    return replace(cluster, device=device, ranks_per_node=ranks)


def scaled(link: Link, factor: float) -> Link:
    return (
        link if factor == 1 else replace(link, name=f"{link.name} x {factor:g}", bytes_per_s=link.bytes_per_s * factor)
    )


def figures(outcome: Outcome) -> Figures:
    simulated = outcome.simulated
    if simulated is None:
        return None
    return simulated.step_time_s * 1e3, simulated.memory.peak_bytes, simulated.exposed_s * 1e3
