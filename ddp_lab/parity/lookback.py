"""Gradients and updates beside those of the step before, and beside those of some micro-batches."""

import numpy as np

from ddp_lab.parity.comparison import Comparison, Quantity
from ddp_lab.parity.store import GRADIENT, SHARE, Recorded
from ddp_lab.parity.table import Place, Table

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


def counted_micro_batches(made: Comparison, step: int) -> str | None:
    """Which micro-batches of run B its gradients are of, if not of all: `rank 1`, `the last micro-batch`.

    A bias tells: what each sample adds to its gradient is known from run A.
    """
    for one in made.of(step, GRADIENT):
        if not one.name.endswith("bias"):
            continue
        rows = _rows_of_bias(made, step, one)
        if rows is None:
            continue
        by_sample, of_a, of_b = rows
        if np.linalg.norm(of_b - of_a) <= NEAR * np.linalg.norm(of_a):
            continue
        for name, keys in _subsets(made, step):
            part = sum((by_sample[key] for key in keys if key in by_sample), np.zeros_like(of_a))
            size = float((part * part).sum())
            if not size:
                continue
            factor = float((part * of_b).sum()) / size
            if np.linalg.norm(of_b - factor * part) <= NEAR * np.linalg.norm(of_b):
                return name
    return None


def _subsets(made: Comparison, step: int) -> list[tuple[str, set[int]]]:
    of_ranks = made.b.facts[step]
    count = max(len(facts["keys"]) for facts in of_ranks)
    found = [(f"rank {rank}", {key for keys in facts["keys"] for key in keys}) for rank, facts in enumerate(of_ranks)]
    for micro in range(count if count > 1 else 0):
        name = "the last micro-batch" if micro == count - 1 else f"micro-batch {micro}"
        found.append((name, {key for facts in of_ranks for key in facts["keys"][micro : micro + 1][0]}))
    return [(name, keys) for name, keys in found if len(found) > 1]


def _rows_of_bias(
    made: Comparison, step: int, bias: Quantity
) -> tuple[dict[int, np.ndarray], np.ndarray, np.ndarray] | None:
    """What each sample of run A adds to the gradient of a bias, and that gradient in both runs."""
    table, place = Table(made.a, step), Place(SHARE, bias.name)
    wanted, theirs = _sketch(made.a, step, GRADIENT, bias), _sketch(made.b, step, GRADIENT, bias)
    if place not in table.places or wanted is None or theirs is None:
        return None
    by_sample = {int(table.key[row]): table.sketches[row] for row in table.places[place]}
    return by_sample, wanted, theirs


def _sketch(run: Recorded, step: int, kind: str, first: Quantity) -> np.ndarray | None:
    table = Table(run, step)
    place = Place(kind, first.name, first.call)
    if place not in table.places:
        return None
    found: np.ndarray = table.sketches[table.places[place][0]]
    return found
