"""Ranges of elements: who saves which, and from where a range is put together again. Pure functions of numbers.

A tensor's elements are counted in row-major order. However ranks cut a parameter, what they hold of it are ranges of
these, so ranges are what a checkpoint stores: any choice and any number of ranks can read the ones that they need.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """Consecutive elements of a parameter that a rank holds.

    Attributes:
        name: The parameter's own name in the plain module.
        start: Number of the first element.
        tensor: What holds them, in any shape. Of what this rank updates: the tensor that its optimizer knows.
    """

    name: str
    start: int
    tensor: Tensor


class Part(NamedTuple):
    """Elements `start` to `end` of tensor, or range, number `which`."""

    which: int
    start: int
    end: int


def share(lengths: Iterable[int], rank: int, size: int) -> list[Part]:
    """Which elements of tensors of these lengths, laid end to end, fall to `rank` if `size` ranks share them evenly.

    Over all ranks each element falls to exactly one; a rank gets at most one element more than another.
    """
    lengths = list(lengths)
    total = sum(lengths)
    start, end = total * rank // size, total * (rank + 1) // size
    parts = []
    for index, length in enumerate(lengths):
        if max(start, 0) < min(end, length):
            parts.append(Part(index, max(start, 0), min(end, length)))
        start, end = start - length, end - length
    return parts


class IncompleteError(ValueError):
    """Some elements are in no range."""


def cover(ranges: Sequence[tuple[int, int]], start: int, end: int) -> list[Part]:
    """Put elements `start` to `end` together from `ranges`, each (first, end) and in any order.

    Returns:
        Parts in order, without gap or overlap: `which` is the number of a range, `start` and `end` count from where
        that begins.

    Raises:
        IncompleteError: elements are missing; says which.
    """
    parts, position = [], start
    for index, (first, last) in sorted(enumerate(ranges), key=lambda item: item[1]):
        if position >= end or first > position:
            break
        if last > position:
            parts.append(Part(index, position - first, min(last, end) - first))
            position = min(last, end)
    if position < end:
        raise IncompleteError(f"element {position} of {end} is in no range")
    return parts
