"""Ranges of elements: which rank saves which, and how a range is assembled from others. Pure functions of numbers.

The elements of a tensor are counted in row-major order. However ranks shard a parameter, each holds ranges of these
elements. So a checkpoint stores ranges, and any choice with any number of ranks can read those that it needs.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """Consecutive elements of a parameter that a rank holds.

    Attributes:
        name: The parameter's name in the plain module.
        start: Number of the first element.
        tensor: Holds the elements, in any shape. If this rank updates them, it is the tensor that its optimizer has.
    """

    name: str
    start: int
    tensor: Tensor


class Part(NamedTuple):
    """Elements `start` to `end` of the tensor or range with number `which`."""

    which: int
    start: int
    end: int


def share(lengths: Iterable[int], rank: int, size: int) -> list[Part]:
    """The elements that `rank` gets if `size` ranks evenly divide tensors of these lengths, laid end to end.

    Each element goes to exactly one rank. A rank gets at most one element more than another.
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


def cover(ranges: Sequence[tuple[int, int]], start: int, end: int) -> list[Part]:
    """Assemble elements `start` to `end` from `ranges`, which are (first, end) in any order.

    Returns:
        Parts in order, without gap or overlap. `which` is the number of a range, from whose start the others count.

    Raises:
        ValueError: names the first missing element.
    """
    parts, position = [], start
    for index, (first, last) in sorted(enumerate(ranges), key=lambda item: item[1]):
        if position >= end or first > position:
            break
        if last > position:
            parts.append(Part(index, position - first, min(last, end) - first))
            position = min(last, end)
    if position < end:
        raise ValueError(f"element {position} of {end} is in no range")
    return parts
