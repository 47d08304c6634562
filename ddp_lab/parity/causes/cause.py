"""What a rule says, and words that rules share."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ddp_lab.parity.comparison import Comparison, Quantity

NEAR = 0.02
"""Relative, of a factor and what it may be."""
SCALE = 256
"""A power of two from here on is a loss scale."""


class Cause(NamedTuple):
    """Attributes:
    name: What it is, with where and how much.
    usually: What people did who met it, and what to do.
    """

    name: str
    usually: str


Rule = Callable[[Comparison, Quantity], Cause | None]


def factor_name(made: Comparison, factor: float) -> str:
    """What `factor` may be in the runs: ranks, micro-batches, degrees of a mesh, the loss scale."""
    ranks, micro = made.b.ranks / made.a.ranks, made.b.micro_batches / made.a.micro_batches
    known = [("ranks", ranks), ("micro-batches", micro)]
    if ranks != 1 and micro != 1:
        known.append(("ranks x micro-batches", ranks * micro))
    known += [(f"{name} of the mesh", float(degree)) for name, degree in made.b.first.get("mesh", {}).items()]
    if factor >= SCALE and abs(np.log2(factor) - round(np.log2(factor))) < NEAR:
        known.append(("a loss scale", factor))
    names = []
    for name, value in known:
        if value != 1 and abs(factor / value - 1) < NEAR:
            names.append(name)
        elif value != 1 and abs(factor * value - 1) < NEAR:
            names.append(f"1 / {name}")
    return " or ".join(dict.fromkeys(names))


def times(made: Comparison, factor: float) -> str:
    """`x 2: ranks`."""
    named = factor_name(made, factor)
    return f"x {factor:.4g}" + (f": {named}" if named else "")


def and_others(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def some_ranks(first: Quantity) -> list[int]:
    """The ranks on which it differs, if it does not on all that have it."""
    known, ranks = {rank for rank, _ in first.error}, first.ranks
    return ranks if -1 not in known and 0 < len(ranks) < len(known) else []


def of_module(first: Quantity) -> str:
    return first.name.partition("#")[0]
