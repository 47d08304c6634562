"""Gradients and updates beside those of the step before, and beside those of some micro-batches."""

import numpy as np

from ddp_lab.parity.comparison import Comparison, Quantity
from ddp_lab.parity.store import GRADIENT, SHARE, Place, Recorded

NEAR = 1e-2


def is_sum_with_step_before(made: Comparison, first: Quantity) -> bool:
    """Whether a gradient of run B is run A's plus run B's of the step before."""
    step = first.step
    now, before = _sketch(made.b, step, GRADIENT, first), _sketch(made.b, step - 1, GRADIENT, first)
    wanted = _sketch(made.a, step, GRADIENT, first)
    if now is None or before is None or wanted is None:
        return False
    return bool(np.linalg.norm(now - before - wanted) <= NEAR * np.linalg.norm(wanted))


def is_of_step_before(made: Comparison, first: Quantity) -> bool:
    """Whether what run B has is what run A had one step before."""
    now = _sketch(made.b, first.step, first.kind, first)
    before = _sketch(made.a, first.step - 1, first.kind, first)
    if now is None or before is None:
        return False
    return bool(np.linalg.norm(now - before) <= NEAR * np.linalg.norm(before))


def scale_after_backward(made: Comparison, step: int) -> float:
    """By what run A multiplies its gradients before the optimizer reads them: 1, if nothing tells."""
    table, found = made.a.table(step), list[float]()
    for place, rows in table.places.items():
        wanted = table.places.get(Place(GRADIENT, place.name)) if place.kind == SHARE else None
        if wanted is not None:
            of_samples, gradient = table.sketches[rows].sum(0), table.sketches[wanted[0]]
            factor = float(of_samples @ gradient) / max(float(of_samples @ of_samples), 1e-300)
            if factor and np.linalg.norm(of_samples * factor - gradient) <= NEAR * np.linalg.norm(gradient):
                found.append(factor)
    return float(np.median(found)) if found else 1.0


def weights_of_micro_batches(made: Comparison, step: int) -> np.ndarray | None:
    """How often each micro-batch of run B counts in its gradients beside run A's, of shape (ranks, micro-batches).

    Biases and norms tell: what each sample adds to their gradients is known from run A. None: they do not tell.
    """
    table = made.a.table(step)
    keys = [[set(some) for some in facts["keys"]] for facts in made.b.facts[step]]
    columns, of_b = list[np.ndarray](), list[np.ndarray]()
    for one in made.of(step, GRADIENT):
        place = Place(SHARE, one.name)
        wanted, theirs = _sketch(made.a, step, GRADIENT, one), _sketch(made.b, step, GRADIENT, one)
        if place not in table.places or wanted is None or theirs is None:
            continue
        rows = table.places[place]
        of_a = table.sketches[rows].sum(0)
        factor = float(of_a @ wanted) / max(float(of_a @ of_a), 1e-300)  # clipping
        if np.linalg.norm(of_a * factor - wanted) > NEAR * np.linalg.norm(wanted):
            continue
        parts = [[rows[np.isin(table.key[rows], list(some))] for some in of_rank] for of_rank in keys]
        columns.append(np.stack([table.sketches[part].sum(0) * factor for of_rank in parts for part in of_rank], 1))
        of_b.append(theirs)
    count = sum(map(len, keys))
    if not columns or count < 2 or len({len(of_rank) for of_rank in keys}) > 1 or 2 * count > len(of_b) * len(of_b[0]):
        return None
    matrix, right = np.concatenate(columns), np.concatenate(of_b)
    weights = np.linalg.lstsq(matrix, right, rcond=None)[0]
    if np.linalg.norm(matrix @ weights - right) > NEAR * np.linalg.norm(right):
        return None
    return weights.reshape(len(keys), -1)


def _sketch(run: Recorded, step: int, kind: str, first: Quantity) -> np.ndarray | None:
    table = run.table(step)
    place = Place(kind, first.name, first.call)
    if place not in table.places:
        return None
    found: np.ndarray = table.sketches[table.places[place][0]]
    return found
