"""Covering arrays: few rows in which every pair of values of any two factors occurs."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Row = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], is_allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows that hold every pair of values that an allowed row can hold. The result is the same in each run.

    Each row begins with a pair that no earlier row holds. Of each other factor it takes the value that adds most
    uncovered pairs.

    Args:
        factors: Values by name; they can be hashed.
        is_allowed: Whether a row, or a part of one, can be tried.
    """

    def pairs(row: Row) -> Iterator[tuple[Any, Any]]:
        return itertools.combinations([(name, row[name]) for name in factors if name in row], 2)

    items = [[(name, value) for value in values] for name, values in factors.items()]
    combinations = itertools.combinations(items, 2)
    uncovered = {pair: None for two_factors in combinations for pair in itertools.product(*two_factors)}
    rows = []
    for pair in list(uncovered):
        row: Row = dict(pair)
        if pair not in uncovered or not is_allowed(row):
            continue
        for name in factors:
            options = [value for value in factors[name] if is_allowed({**row, name: value})]
            if name not in row and options:
                row[name] = max(options, key=lambda v: sum(p in uncovered for p in pairs({**row, name: v})))
        if len(row) == len(factors):
            rows.append({name: row[name] for name in factors})
            for covered in pairs(row):
                uncovered.pop(covered, None)
    return rows


def cover(items: Sequence[T], kinds_of: Callable[[T], set[Any]], cost_of: Callable[[T], float]) -> list[T]:
    """A part of `items` that has all their kinds. Greedy: each choice costs least for each kind that it adds."""
    missing, chosen = set[Any]().union(*map(kinds_of, items)), []
    while missing:
        chosen.append(max(items, key=lambda item: len(kinds_of(item) & missing) / cost_of(item)))
        missing -= kinds_of(chosen[-1])
    return [item for item in items if item in chosen]
