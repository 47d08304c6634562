"""Seconds of an operator at shapes that were not measured, from those that were.

Both ways pass through their points (the geometric mean of those that do the same work), and go on beyond them as a
roofline does. Operators that count no flops are joined by lines in log seconds over log bytes: caches and fresh pages
make them bend, so that no line through all fits. Others have two measures of work, so points do not stand in a row:
there a trend of all is corrected by what the points nearby differ from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FEWEST = 3
"""Distinct points that a constant, a second a flop and a second a byte are fitted to."""
NEAR = 1e-9
"""Squared distance, in natural logarithms, at which two shapes count as the same."""


@dataclass(frozen=True)
class Point:
    """Of one measured shape.

    Attributes:
        work_s: What a roofline gives it; above 0.
        seconds: What it took; above 0.
    """

    flops: int
    bytes_moved: int
    work_s: float
    seconds: float


class Interpolation(Protocol):
    def seconds(self, flops: int, bytes_moved: int, work_s: float) -> float:
        """Of another shape, to which a roofline gives `work_s`."""
        ...


def interpolation(points: Sequence[Point]) -> Interpolation:
    """Args:
    points: Of one operator; at least one.
    """
    return ByWork(points) if any(point.flops for point in points) else ByBytes(points)


class ByBytes:
    """Lines between points in log seconds over log bytes."""

    def __init__(self, points: Sequence[Point]) -> None:
        groups: dict[int, list[Point]] = {}
        for point in points:
            groups.setdefault(point.bytes_moved, []).append(point)
        in_order = sorted(groups)
        self._bytes = np.log(np.array(in_order, dtype=float))
        self._seconds = np.array([np.mean(np.log([each.seconds for each in groups[size]])) for size in in_order])
        self._first, self._last = (groups[in_order[end]][0] for end in (0, -1))

    def seconds(self, flops: int, bytes_moved: int, work_s: float) -> float:
        answer = float(np.exp(np.interp(np.log(bytes_moved), self._bytes, self._seconds)))
        if bytes_moved < self._first.bytes_moved:
            return answer * work_s / self._first.work_s
        return answer * work_s / self._last.work_s if bytes_moved > self._last.bytes_moved else answer


class ByWork:
    """A trend, times the mean of log ratios of points to it, weighted by the inverse square of their distance in log
    flops and log bytes (Shepard, "A two-dimensional interpolation function for irregularly-spaced data", 1968).

    The trend is a constant, so much a flop and so much a byte, each at least 0, of least squared relative error; with
    fewer than 3 points it is the roofline.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._places = places([(point.flops, point.bytes_moved) for point in points])
        measured = np.array([point.seconds for point in points])
        rows = np.array([(1.0, point.flops, point.bytes_moved) for point in points])
        self._line = fit(rows, measured) if len(np.unique(self._places, axis=0)) >= FEWEST else None
        trend = np.array([point.work_s for point in points]) if self._line is None else rows @ self._line
        self._log_ratios = np.log(measured / trend)

    def seconds(self, flops: int, bytes_moved: int, work_s: float) -> float:
        trend = work_s if self._line is None else float(np.array([1.0, flops, bytes_moved]) @ self._line)
        distances = np.sum((self._places - places([(flops, bytes_moved)])) ** 2, axis=1)
        same = distances < NEAR
        weights = same.astype(float) if same.any() else 1 / distances
        return trend * float(np.exp(weights @ self._log_ratios / weights.sum()))


def places(work: Sequence[tuple[int, int]]) -> Floats:
    return np.log1p(np.array(work, dtype=float))


def fit(rows: Floats, seconds: Floats) -> Floats | None:
    """Numbers of at least 0, by column of `rows`, whose products add up to `seconds` with least squared relative error;
    None where these leave some point without any time."""
    from scipy.optimize import nnls

    scale = np.maximum(rows.max(axis=0), 1.0)  # columns then have the same magnitude
    numbers, _ = nnls(rows / scale / seconds[:, None], np.ones(len(seconds)))
    line = numbers / scale
    return line if (rows @ line > 0).all() else None


def held_out_error(points: Sequence[Point], index: int) -> float:
    """Relative error, as a fraction, at one of at least two points, from all others."""
    point = points[index]
    predicted = interpolation([*points[:index], *points[index + 1 :]])
    return abs(predicted.seconds(point.flops, point.bytes_moved, point.work_s) / point.seconds - 1)
