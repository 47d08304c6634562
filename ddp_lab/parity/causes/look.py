"""The first difference of two runs, as tests of causes and their sentences see it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddp_lab.parity.comparison import Comparison, Quantity
from ddp_lab.parity.sketch import SIZE
from ddp_lab.parity.store import GRADIENT, SHARE, Place, Recorded, Table

NEAR = 0.02
"""Relative, of a factor and what it may be."""
CLOSE = 1e-2
"""Relative difference of two sketches of one tensor, at most."""
SCALE = 256
"""A power of two from here on is a loss scale."""
Words = dict[str, Any]


class Look(NamedTuple):
    """Attributes:
    step: The one in which runs differ first, or one before.
    """

    comparison: Comparison
    step: int

    @property
    def first(self) -> Quantity:
        first = self.comparison.first
        assert first is not None  # in no place where quantities are looked at
        return first

    @property
    def module(self) -> str:
        return self.first.name.partition("#")[0]

    @property
    def ranks(self) -> list[int]:
        """The ranks on which it differs, if it does not on all that have it."""
        holders, ranks = {rank for rank, _ in self.first.error}, self.first.ranks
        return ranks if -1 not in holders and 0 < len(ranks) < len(holders) else []

    @property
    def gradients(self) -> list[Quantity]:
        return self.comparison.of(self.step, GRADIENT)

    @property
    def tables(self) -> tuple[Table, Table]:
        return self.comparison.a.table(self.step), self.comparison.b.table(self.step)

    def facts(self, name: str) -> tuple[Any, Any]:
        """What rank 0 of both runs knows of the step."""
        in_a, in_b = (run.facts[self.step][0].get(name) for run in (self.comparison.a, self.comparison.b))
        return in_a, in_b

    def words(self) -> Words:
        """That all sentences may use."""
        words: Words = {"step": self.step, "step_before": self.step - 1}
        if (first := self.comparison.first) is None:
            return words
        factor = first.one_factor
        return words | {
            "first": first,
            "name": first.name or "the model",
            "module": self.module or "the model",
            "kind": first.kind,
            "ranks": ", ".join(map(str, self.ranks)),
            "times": "" if factor is None else times(self.comparison, factor),
        }


def factor_name(comparison: Comparison, factor: float) -> str:
    """What `factor` may be in the runs: ranks, micro-batches, degrees of a mesh, the loss scale."""
    ranks, micro = comparison.b.ranks / comparison.a.ranks, comparison.b.micro_batches / comparison.a.micro_batches
    candidates = {"ranks": ranks, "micro-batches": micro}
    if ranks != 1 and micro != 1:
        candidates["ranks x micro-batches"] = ranks * micro
    candidates |= {f"{name} of the mesh": float(degree) for name, degree in comparison.b.first.get("mesh", {}).items()}
    if factor >= SCALE and is_power_of_two(factor, NEAR):
        candidates["a loss scale"] = factor
    names = []
    for name, value in candidates.items():
        if value != 1 and abs(factor / value - 1) < NEAR:
            names.append(name)
        elif value != 1 and abs(factor * value - 1) < NEAR:
            names.append(f"1 / {name}")
    return " or ".join(names)


def is_power_of_two(factor: float, near: float) -> bool:
    return abs(np.log2(abs(factor)) - round(np.log2(abs(factor)))) < near


def times(comparison: Comparison, factor: float) -> str:
    """`x 2: ranks`."""
    named = factor_name(comparison, factor)
    return f"x {factor:.4g}" + (f": {named}" if named else "")


def and_others(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


# Sketches ------------------------------------------------------------------------------------------------------------


def sketch_of(run: Recorded, step: int, quantity: Quantity) -> np.ndarray:
    """Of the first row, as rank 0 has it; not a number, where the run has no such quantity in the step."""
    place = Place(quantity.kind, quantity.name, quantity.call)
    if step not in run.facts or place not in (table := run.table(step)).places:
        return np.full(SIZE, np.nan)
    sketch: np.ndarray = table.sketches[table.places[place][0]]
    return sketch


def is_close(sketch: np.ndarray, target: np.ndarray) -> bool:
    return bool(np.linalg.norm(sketch - target) <= CLOSE * np.linalg.norm(target))


def scale_after_backward(comparison: Comparison, step: int) -> float:
    """The factor by which run A scales its gradients before the optimizer reads them; 1 if nothing tells."""
    table, factors = comparison.a.table(step), list[float]()
    for place, rows in table.places.items():
        gradient_rows = table.places.get(Place(GRADIENT, place.name)) if place.kind == SHARE else None
        if gradient_rows is not None:
            of_samples, gradient = table.sketches[rows].sum(0), table.sketches[gradient_rows[0]]
            factor = float(of_samples @ gradient) / max(float(of_samples @ of_samples), 1e-300)
            if factor and is_close(of_samples * factor, gradient):
                factors.append(factor)
    return float(np.median(factors)) if factors else 1.0


def weights_of_micro_batches(comparison: Comparison, step: int) -> np.ndarray | None:
    """How often each micro-batch of run B counts in its gradients beside run A's, of shape (ranks, micro-batches).

    Biases and norms tell, since run A records what each sample adds to their gradients. None: they do not tell.
    """
    table = comparison.a.table(step)
    keys = [[set(batch) for batch in facts["keys"]] for facts in comparison.b.facts[step]]
    columns, of_b = list[np.ndarray](), list[np.ndarray]()
    for gradient in comparison.of(step, GRADIENT):
        place = Place(SHARE, gradient.name)
        target, sketch = sketch_of(comparison.a, step, gradient), sketch_of(comparison.b, step, gradient)
        if place not in table.places:
            continue
        rows = table.places[place]
        of_a = table.sketches[rows].sum(0)
        factor = float(of_a @ target) / max(float(of_a @ of_a), 1e-300)  # clipping
        if not is_close(of_a * factor, target):
            continue
        parts = [[rows[np.isin(table.key[rows], list(batch))] for batch in of_rank] for of_rank in keys]
        columns.append(np.stack([table.sketches[part].sum(0) * factor for of_rank in parts for part in of_rank], 1))
        of_b.append(sketch)
    count = sum(map(len, keys))
    if count < 2 or len({len(of_rank) for of_rank in keys}) > 1:
        return None
    weights = _combination(columns, of_b)
    return None if weights is None else weights.reshape(len(keys), -1)


def weights_of_parts(comparison: Comparison, step: int) -> np.ndarray | None:
    """Weights with which the gradients of run B's ranks add up to run A's, of shape (ranks,)."""
    blocks = {place.name: parts for place, parts in comparison.b.table(step).blocks.items() if place.kind == GRADIENT}
    cut = [gradient for gradient in comparison.of(step, GRADIENT) if gradient.name in blocks]
    nothing, ranks = np.zeros(SIZE), range(comparison.b.ranks)
    columns = [np.stack([blocks[gradient.name].get(rank, nothing) for rank in ranks], 1) for gradient in cut]
    return _combination(columns, [sketch_of(comparison.a, step, gradient) for gradient in cut])


def _combination(columns: list[np.ndarray], targets: list[np.ndarray]) -> np.ndarray | None:
    """Weights with which columns add up to the targets. None: no weights do, or there are too few rows to tell."""
    if not columns or 2 * columns[0].shape[1] > sum(map(len, columns)):
        return None
    matrix, right = np.concatenate(columns), np.concatenate(targets)
    weights: np.ndarray = np.linalg.lstsq(matrix, right, rcond=None)[0]
    return weights if is_close(matrix @ weights, right) else None
