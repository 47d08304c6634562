"""Seconds of an operator at shapes that were not measured, from those that were."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


class Interpolation:
    """Passes through its points. Between and beyond them it follows a trend, times what points nearby differ from it.

    The trend is `constant + a x flops + b x bytes`, each at least 0, of least squared relative error; with fewer than 3
    points it is the roofline. The factor is the mean of log ratios, weighted by the inverse square of the distance in
    log flops and log bytes (Shepard, "A two-dimensional interpolation function for irregularly-spaced data", 1968).

    Args:
        points: At least one.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._places = places([(point.flops, point.bytes_moved) for point in points])
        measured = np.array([point.seconds for point in points])
        rows = np.array([(1.0, point.flops, point.bytes_moved) for point in points])
        self._line = fit(rows, measured) if len(np.unique(self._places, axis=0)) >= FEWEST else None
        work = np.array([point.work_s for point in points])
        trend = work if self._line is None else rows @ self._line
        self._log_ratios = np.log(measured / trend)

    def seconds(self, flops: int, bytes_moved: int, work_s: float) -> float:
        """Args:
        work_s: What the roofline gives it.
        """
        trend = work_s if self._line is None else float(np.array([1.0, flops, bytes_moved]) @ self._line)
        distances = np.sum((self._places - places([(flops, bytes_moved)])) ** 2, axis=1)
        same = distances < NEAR
        weights = same.astype(float) if same.any() else 1 / distances
        return trend * float(np.exp(weights @ self._log_ratios / weights.sum()))


def places(work: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
    return np.log1p(np.array(work, dtype=float))


def fit(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Numbers of at least 0, by column of `rows`, whose products add up to `seconds` with least squared relative error;
    None where these leave some point without any time."""
    from scipy.optimize import nnls

    scale = np.maximum(rows.max(axis=0), 1.0)  # columns then have the same magnitude
    numbers, _ = nnls(rows / scale / seconds[:, None], np.ones(len(seconds)))
    line = numbers / scale
    return line if (rows @ line > 0).all() else None


def held_out_errors(points: Sequence[Point]) -> list[float]:
    """Relative error at each point, from all others; empty for a single one."""
    errors = []
    for index, point in enumerate(points):
        others = [*points[:index], *points[index + 1 :]]
        if others:
            predicted = Interpolation(others).seconds(point.flops, point.bytes_moved, point.work_s)
            errors.append(abs(predicted / point.seconds - 1))
    return errors
