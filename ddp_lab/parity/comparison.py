"""Two recorded runs, quantity by quantity, in the order in which a step makes them.

A quantity agrees if each rank has the same as run A, or if what the ranks have adds up to it (partial sums of tensor
parallelism), or if it is cut over ranks and its moments add up. How far they may differ is what rounding does: a
yardstick, which is run A again with each output rounded once more, or limits by dtype.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ddp_lab.parity.store import (
    BUFFER,
    GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    PARAMETER,
    START,
    WHOLE,
    Recorded,
)
from ddp_lab.parity.table import Place, Table
from ddp_lab.runtime.errors import UserError

KINDS = (START, OUTPUT, OUTPUT_GRADIENT, GRADIENT, PARAMETER, BUFFER)
EPSILON = {"float32": 2**-23, "float64": 2**-52, "bfloat16": 2**-7, "float16": 2**-10}
TIMES_YARDSTICK = 16.0
"""How much more than the yardstick two runs may differ: sums over ranks round in other places than it does."""
LEAST = {"float32": 64.0, "float64": 64.0, "bfloat16": 4.0, "float16": 8.0}
"""Units in the last place that two runs may differ in any case."""
WITHOUT_YARDSTICK = {OUTPUT: 2**10, OUTPUT_GRADIENT: 2**12, GRADIENT: 2**12, START: 1, BUFFER: 2**12, PARAMETER: 2**14}
"""Units in the last place, where there is no yardstick."""
MOST = {OUTPUT: 0.1, OUTPUT_GRADIENT: 0.3, GRADIENT: 0.3, START: 1e-3, BUFFER: 0.1, PARAMETER: 0.5}
"""No limit is wider."""
SMALL = 1e-4
"""A gradient that is this much smaller than that of the whole model is rounding."""


@dataclass
class Quantity:
    """One quantity in both runs.

    Attributes:
        error: Of the norm, by rank and micro-batch of run B, after the best `way`.
        factor: What run A's is to be multiplied with, by rank and micro-batch.
        rest: What is left of the difference when that factor is taken out.
        way: `equal`, `sum` or `parts`.
        limit: What rounding may do.
        coarse: Of an update, how many times larger the parameter is.
        spread: Of what each rank has whole, how far ranks of run B are from one another, relative.
    """

    step: int
    kind: str
    name: str
    call: int
    error: dict[tuple[int, int], float]
    factor: dict[tuple[int, int], float]
    rest: dict[tuple[int, int], float]
    way: str = "equal"
    limit: float = 0.0
    dtypes: tuple[str, str] = ("", "")
    norm: float = 0.0
    coarse: float = 0.0
    spread: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.error.values(), default=0.0)

    @property
    def differs(self) -> bool:
        return not self.worst <= self.limit

    @property
    def ranks(self) -> list[int]:
        """Those on which it differs."""
        return sorted({rank for (rank, _), error in self.error.items() if not error <= self.limit})

    @property
    def digits(self) -> float:
        """To how many digits it agrees."""
        return max(0.0, float(-np.log10(max(self.worst, 1e-16)))) if np.isfinite(self.worst) else 0.0

    @property
    def one_factor(self) -> float | None:
        """The factor, if it is the same on all ranks and in all micro-batches, and explains the difference."""
        values = list(self.factor.values())
        is_one = bool(values) and max(values) - min(values) <= 2e-2 * abs(values[0])
        limit = max(10 * self.limit, 1e-3)
        return float(np.mean(values)) if is_one and max(self.rest.values()) <= limit * abs(values[0]) else None


@dataclass
class Comparison:
    """Attributes:
    quantities: In the order in which run A made them, as far as both runs have them.
    only: Names of gradients that only one run has, by step: in A, in B.
    scales: Of each step, the factor between output gradients of B and A, by rank and micro-batch. It is the scale
        of the loss from which backward ran, and no fault by itself.
    """

    a: Recorded
    b: Recorded
    quantities: list[Quantity] = field(default_factory=list)
    only: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    scales: dict[int, dict[tuple[int, int], float]] = field(default_factory=dict)
    buffers: dict[int, dict[str, float]] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)

    @property
    def steps(self) -> list[int]:
        return [step for step in self.a.steps if step in self.b.facts]

    def of(self, step: int, kind: str) -> list[Quantity]:
        return [one for one in self.quantities if (one.step, one.kind) == (step, kind)]

    @property
    def first(self) -> Quantity | None:
        return next((one for one in self.quantities if one.differs), None)


def compare(a: Recorded, b: Recorded, yardstick: Recorded | None = None) -> Comparison:
    """Raises:
    UserError: the runs have no step in common.
    """
    steps = [step for step in a.steps if step in b.steps]
    if not steps:
        raise UserError(f"{a.folder} and {b.folder} have no step in common")
    b = _matched(a, b)
    made = Comparison(a, b)
    rounded = {(one.step, one.kind, one.name, one.call): one.worst for one in _all(a, yardstick, steps)}
    made.quantities = list(_all(a, b, steps, made))
    coarsest = max(
        (d for one in made.quantities for d in one.dtypes if d in EPSILON), key=EPSILON.__getitem__, default="float32"
    )
    for one in made.quantities:
        one.limit = _limit(one, rounded, coarsest)
    for step in steps:
        _forgive_small(made.of(step, GRADIENT))
        inner = _inner(made.of(step, OUTPUT))
        made.unseen |= {name for name, _ in inner}
        modules = (OUTPUT, OUTPUT_GRADIENT)
        made.quantities = [
            one
            for one in made.quantities
            if not (one.step == step and one.kind in modules and (one.name, one.call) in inner)
        ]
    return made


def _matched(a: Recorded, b: Recorded) -> Recorded:
    """Run B with run A's samples, in their order, where each of its ranks has a part of every sample."""
    ours, theirs = Table(a, a.steps[0]), Table(b, a.steps[0])
    place = next((one for one in ours.places if one.kind == OUTPUT and one in theirs.places), None)
    if place is None or b.ranks < 2:
        return b
    at_a, at_b = ours.places[place], theirs.places[place]
    if theirs.elements[at_b][0] * b.ranks != ours.elements[at_a][0] or set(ours.key[at_a]) & set(theirs.key[at_b]):
        return b
    samples = {step: a.samples(step)[0] for step in a.steps if step in b.facts}
    same = all(len(keys) == len(samples[step]) for step in samples for keys in b.samples(step))
    return b.as_parts_of(samples) if same else b


def _limit(one: Quantity, rounded: Mapping[tuple[int, str, str, int], float], coarsest: str) -> float:
    """`coarsest`: the dtype in which any output is rounded, and what follows from it with it."""
    dtype = "float32" if one.kind in (START, BUFFER) else coarsest
    unit = EPSILON.get(dtype, 2**-23) * (max(1.0, one.coarse) if dtype == "float32" else 1.0)
    if not rounded:
        return min(unit * WITHOUT_YARDSTICK[one.kind] * (1 + one.step), MOST[one.kind])
    here = rounded.get((one.step, one.kind, one.name, one.call), 0.0)
    if one.kind == START:
        return unit
    alike = [error for (step, kind, _, _), error in rounded.items() if (step, kind) == (one.step, one.kind)]
    return max(
        TIMES_YARDSTICK * here, TIMES_YARDSTICK / 2 * float(np.median(alike or [0.0])), LEAST.get(dtype, 64.0) * unit
    )


def _forgive_small(gradients: list[Quantity]) -> None:
    """What is next to nothing beside the whole gradient may be all rounding, as that of a key's bias."""
    total = np.sqrt(sum(one.norm**2 for one in gradients))
    for one in gradients:
        if one.norm < SMALL * total:
            one.limit = max(one.limit, one.limit * SMALL * total / max(one.norm, 1e-300))


def _inner(outputs: list[Quantity]) -> set[tuple[str, int]]:
    """Name and call of what differs within a module whose output agrees: another implementation may hand other things
    from one of its parts to the next."""
    agreeing, inner = {one.name for one in outputs if not one.differs}, set()
    for one in outputs:
        parts = one.name.split(".")
        around = {".".join(parts[:count]) for count in range(len(parts))}
        if one.differs and around & agreeing:
            inner.add((one.name, one.call))
    return inner


def _all(a: Recorded, b: Recorded | None, steps: list[int], made: Comparison | None = None) -> Iterator[Quantity]:
    if b is None:
        return
    for step in steps:
        if step not in b.facts:
            continue
        tables = Table(a, step), Table(b, step)
        here = [place for place in tables[0].places if place in tables[1].places and place.kind in KINDS]
        found = [one for place in here if (one := _compared(step, place, *tables)) is not None]
        scales = _scales([one for one in found if one.kind == OUTPUT_GRADIENT])
        for one in found:
            if one.kind == OUTPUT_GRADIENT:
                _unscale(one, scales)
        yield from sorted(found, key=lambda one: KINDS.index(one.kind))
        if made is not None:
            made.scales[step] = scales
            made.buffers[step] = {place.name: tables[1].spread(place) for place in here if place.kind == BUFFER}
            names = [{place.name for place in table.places if place.kind == GRADIENT} for table in tables]
            made.only[step] = sorted(names[0] - names[1]), sorted(names[1] - names[0])
            made.unseen |= {
                place.name for place in tables[0].places if place.kind == OUTPUT and place not in tables[1].places
            }


def _compared(step: int, place: Place, a: Table, b: Table) -> Quantity | None:
    """None: the runs give no like for like."""
    in_a, rows = dict[int, int](), b.places[place]
    for row in a.places[place]:
        in_a.setdefault(int(a.key[row]), row)
    if place.kind == BUFFER:  # after a step each rank may have its own; the next forward pass shows if it matters
        rows = rows[b.rank[rows] == 0]
    at_b = np.array([row for row in rows if b.key[row] in in_a], dtype=int)
    if not len(at_b):
        return None
    at_a = np.array([in_a[key] for key in b.key[at_b]])
    groups: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(at_b):
        groups.setdefault((int(b.rank[row]), int(b.micro_batch[row])), []).append(number)
    is_of_modules = place.kind in (OUTPUT, OUTPUT_GRADIENT)
    if is_of_modules and (b.key[at_b] == WHOLE).all():
        squares = b.moments[at_b][:, 1]
        if len(groups) < 2 or np.ptp(squares) > 1e-6 * squares.max():
            return None  # of a micro-batch as a whole
    found = {which: _difference(a.sketches[at_a[n]], b.sketches[at_b[n]]) for which, n in groups.items()}
    error, factor, rest = ({which: numbers[n] for which, numbers in found.items()} for n in range(3))
    dtypes = str(a.dtype[at_a[0]]), str(b.dtype[at_b[0]])
    norm = float(np.sqrt(a.moments[list(in_a.values())][:, 1].sum()))
    made = Quantity(step, *place, error, factor, rest, dtypes=dtypes, norm=norm)
    if place.kind == PARAMETER:  # the norm of an update, and how coarse its parameter is beside it
        made.norm = float(np.linalg.norm(a.sketches[at_a[0]]))
        made.coarse = float(a.held[at_a[0]]) / max(made.norm, 1e-300)
    is_cut = bool((a.elements[at_a] != b.elements[at_b]).any())
    if not is_of_modules and not is_cut:
        made.spread = b.spread(place)
        return made
    if is_cut and place.kind in (PARAMETER, BUFFER):  # of an update we have no moments
        return None
    keys, which = np.unique(b.key[at_b], return_inverse=True)
    firsts = np.array([in_a[key] for key in keys])
    if is_cut:
        copies = np.zeros(len(keys))
        np.add.at(copies, which, b.elements[at_b] / a.elements[at_a])
        parts = _added(b.moments[at_b], which, len(keys)) / np.maximum(copies, 1e-9)[:, None]
        _take(made, "parts", *_difference(_sizes(a.moments[firsts]), _sizes(parts)))
    elif len(keys) < len(at_b):
        of_sum = _difference(a.sketches[firsts], _added(b.sketches[at_b], which, len(keys)))
        if of_sum[0] < made.worst:
            _take(made, "sum", *of_sum)
    return made


def _added(values: np.ndarray, which: np.ndarray, count: int) -> np.ndarray:
    total = np.zeros((count, values.shape[1]))
    np.add.at(total, which, values)
    return total


def _sizes(moments: np.ndarray) -> np.ndarray:
    """1-norm and 2-norm of each sample."""
    return np.stack([moments[:, 2], np.sqrt(moments[:, 1])], axis=1)


def _difference(of_a: np.ndarray, of_b: np.ndarray) -> tuple[float, float, float]:
    """Relative norm of the difference, the factor, and the relative norm without it."""
    size, product = float((of_a * of_a).sum()), float((of_a * of_b).sum())
    if not np.isfinite(size + product) or not np.isfinite(of_b).all():
        same = np.array_equal(np.isfinite(of_a), np.isfinite(of_b))
        return (0.0 if same else float("inf")), 1.0, 0.0
    if size == 0:
        return (0.0 if not of_b.any() else float("inf")), 1.0, float("inf") if of_b.any() else 0.0
    factor = product / size
    return (
        float(np.sqrt(((of_b - of_a) ** 2).sum() / size)),
        factor,
        float(np.sqrt(((of_b - factor * of_a) ** 2).sum() / size)),
    )


def _take(made: Quantity, way: str, error: float, factor: float, rest: float) -> None:
    made.way, made.error, made.factor, made.rest = way, {(-1, -1): error}, {(-1, -1): factor}, {(-1, -1): rest}


def _scales(gradients: list[Quantity]) -> dict[tuple[int, int], float]:
    """The most common factor of output gradients, by rank and micro-batch."""
    found: dict[tuple[int, int], list[float]] = {}
    for one in gradients:
        if one.norm:
            for which, factor in one.factor.items():
                if one.rest[which] <= 0.05 * abs(factor):
                    found.setdefault(which, []).append(factor)
    return {which: float(np.median(factors)) for which, factors in found.items()}


def _unscale(one: Quantity, scales: dict[tuple[int, int], float]) -> None:
    usual = float(np.median(list(scales.values()))) if scales else 1.0
    for which, factor in one.factor.items():
        scale = scales.get(which, usual) or 1.0
        one.error[which] = float(np.hypot(factor / scale - 1, one.rest[which] / scale))
        one.factor[which] = factor / scale
        one.rest[which] /= abs(scale)
