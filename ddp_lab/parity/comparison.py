"""Two recorded runs, quantity by quantity, in the order in which a step makes them.

A quantity agrees in one of three ways: each rank has the same as run A; the ranks' tensors add up to it (partial sums
of tensor parallelism); or it is cut over ranks and its moments add up. Rounding sets how far they may differ
(`quantity.limit_of`).
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from ddp_lab.parity.quantity import EPSILON, Quantity, forgive_small, limit_of
from ddp_lab.parity.store import (
    BUFFER,
    GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    PARAMETER,
    START,
    WHOLE,
    Place,
    Recorded,
    Table,
    matched,
)
from ddp_lab.runtime.errors import UserError

KINDS = (START, OUTPUT, OUTPUT_GRADIENT, GRADIENT, PARAMETER, BUFFER)
UNSEEN, FEWER, FILLED, INNER = "unseen", "fewer calls", "filled up otherwise", "within one that agrees"
"""Why outputs are left out."""


@dataclass
class Comparison:
    """Attributes:
    quantities: In the order in which run A made them, as far as both runs have them.
    only: Names of gradients that only one run has, by step: in A, in B.
    left_out: Modules whose outputs are not compared, by reason: `UNSEEN`, `FEWER`, `FILLED`, `INNER`.
    scales: Of each step, the factor between output gradients of B and A, by rank and micro-batch. It is the scale
        of the loss from which backward ran, and no fault by itself.
    """

    a: Recorded
    b: Recorded
    quantities: list[Quantity] = field(default_factory=list)
    only: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    scales: dict[int, dict[tuple[int, int], float]] = field(default_factory=dict)
    buffers: dict[int, dict[str, float]] = field(default_factory=dict)
    left_out: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def steps(self) -> list[int]:
        return [step for step in self.a.steps if step in self.b.facts]

    def of(self, step: int, kind: str) -> list[Quantity]:
        return [quantity for quantity in self.quantities if (quantity.step, quantity.kind) == (step, kind)]

    @property
    def first(self) -> Quantity | None:
        return next((quantity for quantity in self.quantities if quantity.differs), None)


def compare(a: Recorded, b: Recorded, yardstick: Recorded | None = None) -> Comparison:
    if not set(a.steps) & set(b.steps):
        raise UserError(f"{a.folder} and {b.folder} have no step in common")
    comparison = _without_limits(a, matched(a, b))
    rounded = _without_limits(a, yardstick).quantities if yardstick is not None else []
    errors = {(quantity.step, quantity.kind, quantity.name, quantity.call): quantity.worst for quantity in rounded}
    coarsest = max(
        (d for quantity in comparison.quantities for d in quantity.dtypes if d in EPSILON),
        key=EPSILON.__getitem__,
        default="float32",
    )
    for quantity in comparison.quantities:
        quantity.limit = limit_of(quantity, errors, coarsest)
    for step in comparison.steps:
        forgive_small(comparison.of(step, GRADIENT), comparison.of(step, PARAMETER))
        inner = _inner(comparison.of(step, OUTPUT))
        comparison.left_out[INNER] |= {name for name, _ in inner}
        modules = (OUTPUT, OUTPUT_GRADIENT)
        comparison.quantities = [
            quantity
            for quantity in comparison.quantities
            if not (quantity.step == step and quantity.kind in modules and (quantity.name, quantity.call) in inner)
        ]
    return comparison


def _inner(outputs: list[Quantity]) -> set[tuple[str, int]]:
    """Name and call of what differs within a module whose output agrees: another implementation may hand other things
    from one of its parts to the next."""
    agreeing, inner = {output.name for output in outputs if not output.differs}, set()
    for output in outputs:
        parts = output.name.split(".")
        around = {".".join(parts[:count]) for count in range(len(parts))}
        if output.differs and around & agreeing:
            inner.add((output.name, output.call))
    return inner


def _without_limits(a: Recorded, b: Recorded) -> Comparison:
    comparison = Comparison(a, b)
    for step in comparison.steps:
        in_a, in_b = a.table(step), b.table(step)
        common = [place for place in in_a.places if place in in_b.places and place.kind in KINDS]
        quantities = [
            quantity
            for place in common
            if (quantity := _compared(step, place, in_a, in_b, comparison.left_out)) is not None
        ]
        comparison.scales[step] = _scales([quantity for quantity in quantities if quantity.kind == OUTPUT_GRADIENT])
        for quantity in quantities:
            if quantity.kind == OUTPUT_GRADIENT:
                _unscale(quantity, comparison.scales[step])
        comparison.quantities += sorted(quantities, key=lambda quantity: KINDS.index(quantity.kind))
        comparison.buffers[step] = {place.name: in_b.spread(place) for place in common if place.kind == BUFFER}
        of_a, of_b = ({place.name for place in table.places if place.kind == GRADIENT} for table in (in_a, in_b))
        comparison.only[step] = sorted(of_a - of_b), sorted(of_b - of_a)
        names = {place.name for place in in_b.places if place.kind == OUTPUT}
        for place in in_a.places.keys() - in_b.places.keys():
            if place.kind == OUTPUT:
                comparison.left_out[FEWER if place.name in names else UNSEEN].add(place.name)
    return comparison


def _compared(step: int, place: Place, a: Table, b: Table, left_out: dict[str, set[str]]) -> Quantity | None:
    """What both runs have of a quantity. None: they have nothing that compares."""
    # rows of both runs, by sample
    in_a, rows = dict[int, int](), b.places[place]
    for row in a.places[place]:
        in_a.setdefault(int(a.key[row]), row)
    if place.kind == BUFFER:  # after a step each rank may have its own; the next forward pass shows if it matters
        rows = rows[b.rank[rows] == 0]
    at_b = np.array([row for row in rows if b.key[row] in in_a], dtype=int)
    if not len(at_b):
        return None
    at_a = np.array([in_a[key] for key in b.key[at_b]])
    of_model = a.elements[at_a] == b.elements[at_b]
    if not place.name and of_model.any():  # what an earlier stage of a pipeline answers is not what the model does
        at_a, at_b = at_a[of_model], at_b[of_model]
    # each rank and micro-batch by itself
    groups: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(at_b):
        groups.setdefault((int(b.rank[row]), int(b.micro_batch[row])), []).append(number)
    is_of_modules = place.kind in (OUTPUT, OUTPUT_GRADIENT)
    if is_of_modules and (b.key[at_b] == WHOLE).all():
        if (b.elements[at_b] == 1).all():
            return None  # a loss or a term of it, which `causes.forward.a_number_has_a_factor` reads
        squares = b.moments[at_b][:, 1]
        if len(groups) < 2 or np.ptp(squares) > 1e-6 * squares.max():
            return None  # of a micro-batch as a whole
    zero = {key for key, n in groups.items() if not (a.moments[at_a[n]].any() or b.moments[at_b[n]].any())}
    nonzero = {key: n for key, n in groups.items() if key not in zero} or groups  # zeros have no factor
    differences = {key: _difference(a.sketches[at_a[n]], b.sketches[at_b[n]]) for key, n in nonzero.items()}
    error, factor, remainder = ({key: numbers[n] for key, numbers in differences.items()} for n in range(3))
    dtypes = str(a.dtype[at_a[0]]), str(b.dtype[at_b[0]])
    norm = float(np.sqrt(a.moments[list(in_a.values())][:, 1].sum()))
    quantity = Quantity(step, *place, error, factor, remainder, dtypes=dtypes, norm=norm)
    if place.kind == PARAMETER:  # the norm of an update, and how coarse its parameter is beside it
        quantity.norm = float(np.linalg.norm(a.sketches[at_a[0]]))
        quantity.coarse = float(a.norm[at_a[0]]) / max(quantity.norm, 1e-300)
    # sums over ranks, of copies or of parts
    shares = b.elements[at_b] / a.elements[at_a]
    is_cut = bool((shares != 1).any())
    if not is_of_modules and not is_cut:
        quantity.spread = b.spread(place)
        return quantity
    if is_cut and place.kind in (PARAMETER, BUFFER):  # of an update we have no moments
        return None
    keys, slots = np.unique(b.key[at_b], return_inverse=True)
    firsts = np.array([in_a[key] for key in keys])
    if is_cut:
        copies = np.bincount(slots, shares)
        is_other = (shares > 1).any() or (copies < 1 - 1e-9).any()  # more or fewer tokens than run A's
        if is_other and is_of_modules and not b.is_cut:
            left_out[FILLED].add(place.name)
            return None
        parts = _added(b.moments[at_b], slots, len(keys)) / copies[:, None]
        found_in_parts = _difference(_sizes(a.moments[firsts]), _sizes(parts))
        if b.is_cut:  # what has no samples, as an embedding of positions, has other rows in a part: only sums compare
            of_all = (_sizes(moments.sum(0, keepdims=True)) for moments in (a.moments[firsts], parts))
            found_in_parts = min(found_in_parts, _difference(*of_all))
        _take(quantity, "parts", *found_in_parts)
    elif len(keys) < len(at_b):
        of_sum = _difference(a.sketches[firsts], _added(b.sketches[at_b], slots, len(keys)))
        if of_sum[0] < quantity.worst:
            _take(quantity, "sum", *of_sum)
    return quantity


def _added(values: np.ndarray, slots: np.ndarray, count: int) -> np.ndarray:
    total = np.zeros((count, values.shape[1]))
    np.add.at(total, slots, values)
    return total


def _sizes(moments: np.ndarray) -> np.ndarray:
    """1-norm and 2-norm of each sample."""
    return np.stack([moments[:, 2], np.sqrt(moments[:, 1])], axis=1)


def _difference(of_a: np.ndarray, of_b: np.ndarray) -> tuple[float, float, float]:
    """Relative norm of the difference; the factor between both; and the relative norm once the factor is taken out."""
    size, product = float((of_a * of_a).sum()), float((of_a * of_b).sum())
    if not np.isfinite(size + product) or not np.isfinite(of_b).all():
        is_alike = np.array_equal(np.isfinite(of_a), np.isfinite(of_b))
        return (0.0 if is_alike else float("inf")), 1.0, 0.0
    if size == 0:
        return (0.0 if not of_b.any() else float("inf")), 1.0, float("inf") if of_b.any() else 0.0
    factor = product / size
    return (
        float(np.sqrt(((of_b - of_a) ** 2).sum() / size)),
        factor,
        float(np.sqrt(((of_b - factor * of_a) ** 2).sum() / size)),
    )


def _take(quantity: Quantity, way: str, error: float, factor: float, remainder: float) -> None:
    quantity.way, quantity.error, quantity.factor, quantity.remainder = (
        way,
        {(-1, -1): error},
        {(-1, -1): factor},
        {(-1, -1): remainder},
    )


def _scales(gradients: list[Quantity]) -> dict[tuple[int, int], float]:
    """The median factor of output gradients, by rank and micro-batch."""
    factors_by_batch: dict[tuple[int, int], list[float]] = {}
    for gradient in gradients:
        if gradient.norm:
            for key, factor in gradient.factor.items():
                if gradient.remainder[key] <= 0.05 * abs(factor):
                    factors_by_batch.setdefault(key, []).append(factor)
    return {key: float(np.median(factors)) for key, factors in factors_by_batch.items()}


def _unscale(gradient: Quantity, scales: dict[tuple[int, int], float]) -> None:
    if not gradient.norm:
        return
    usual = float(np.median(list(scales.values()))) if scales else 1.0
    for key, factor in gradient.factor.items():
        scale = scales.get(key, usual) or 1.0
        gradient.error[key] = float(np.hypot(factor / scale - 1, gradient.remainder[key] / scale))
        gradient.factor[key] = factor / scale
        gradient.remainder[key] /= abs(scale)
