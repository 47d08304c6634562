"""The time of a collective as a function of its payload, fitted to measured times.

The alpha-beta model says that a message takes a latency plus a time for each byte (Hockney, "The communication
challenge for MPP", 1994). Libraries change their algorithm with the size, and caches are limited, so one pair of
numbers holds only for a range of sizes. `LinkModel` has one pair for each such range. It depends neither on processes
nor on torch, so it can be tested with numbers alone.

    model = LinkModel.fit(payload_bytes=[1e3, 1e4, 1e5, 1e6, 1e7], seconds=[5e-5, 6e-5, 1.5e-4, 1e-3, 9e-3])
    model.seconds(25 * 2**20)                                 # for one payload
    model.seconds(np.array([1e6, 2e6])).sum()                 # for several
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

FEWEST_SIZES = 3
"""A piece must explain so many distinct sizes, one more than it has numbers to fit."""
EQUAL_ENOUGH = 0.01
"""A relative error. Below it, a better fit is no reason for another piece: measurements are not more exact."""
FARTHEST = 4.0
"""A time that is off by a larger factor, for example because the machine paused, counts as if it were off by this."""
FIT_STEPS = 10
HUBER = 1.345 * 1.4826
"""An error counts less beyond this multiple of the median absolute error. If errors are normal, the fit is as good as
least squares with 95 % of the measurements (Huber, "Robust Statistics", 1981)."""
LARGE_BYTES = 10**6
"""From this size on, bandwidth matters more than latency. The error of a fit is stated for these sizes."""


@dataclass(frozen=True)
class Piece:
    """From `from_bytes` up to the next piece, a payload of n bytes takes `latency_s + n * seconds_per_byte` seconds."""

    from_bytes: float
    latency_s: float
    seconds_per_byte: float

    def seconds(self, payload_bytes: ArrayLike) -> Floats:
        return self.latency_s + self.seconds_per_byte * np.asarray(payload_bytes, float)


@dataclass(frozen=True)
class LinkModel:
    """Seconds that a collective takes, by the bytes of its payload (nccl-tests' definition of size).

    More bytes never take less time. If a piece would start below the end of the piece before, the time stays at that
    end until the piece reaches it.

    Attributes:
        pieces: The first starts at 0 bytes, and each later one at more bytes than the one before.

    Raises:
        ValueError: the pieces are in another order, or one of their numbers is negative or not finite.
    """

    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        starts = [piece.from_bytes for piece in self.pieces]
        if not starts or starts[0] != 0 or any(later <= earlier for earlier, later in pairwise(starts)):
            raise ValueError(f"pieces begin at {starts} bytes: the first must begin at 0, each other after the last")
        numbers = [(piece.latency_s, piece.seconds_per_byte) for piece in self.pieces]
        if not np.isfinite([starts, *zip(*numbers, strict=True)]).all() or np.min(numbers) < 0:
            raise ValueError(f"latencies and seconds a byte must be finite and at least 0, not {numbers}")

    def seconds(self, payload_bytes: ArrayLike) -> Floats:
        """Predicted seconds for an array of payloads, in the same shape.

        Raises:
            ValueError: a payload is below 0 bytes, or nan.
        """
        payloads = np.asarray(payload_bytes, float)
        if not (payloads >= 0).all():
            raise ValueError(f"payloads must be at least 0 bytes, not {np.min(payloads)}")
        answer, end = self.pieces[0].seconds(payloads), 0.0
        for before, piece in pairwise(self.pieces):
            end = max(end, float(before.seconds(piece.from_bytes)))
            answer = np.where(payloads >= piece.from_bytes, np.maximum(piece.seconds(payloads), end), answer)
        return answer

    @classmethod
    def fit(cls, payload_bytes: ArrayLike, seconds: ArrayLike, most_pieces: int = 3) -> "LinkModel":
        """Fit 1 to `most_pieces` pieces to measured times.

        Each piece is a line by Huber's loss of log ratios (`fit_line`). So small payloads count as much as large ones,
        and a few outliers, such as the burst that a traffic shaper lets through, hardly change the line. For each
        number of pieces all breaks are tried, and those with the least sum of absolute log ratios are taken. The number
        of pieces is the one with the least Bayesian information criterion (Schwarz, "Estimating the dimension of a
        model", 1978) of squared log ratios, in which errors below `EQUAL_ENOUGH` count as that.

        Args:
            payload_bytes: At least one. A size may occur several times.
            seconds: The time of each, such as the median over repetitions.
            most_pieces: At least 1.

        Raises:
            ValueError: the lengths differ or are 0, a size is below 0, or a time is not above 0.
        """
        sizes, times = checked(payload_bytes, seconds)
        distinct, first = np.unique(sizes, return_index=True)
        bounds = np.append(first, len(sizes))
        candidates = [cls._joined(*split, distinct) for split in best_splits(sizes, times, bounds, most_pieces)]
        return min(candidates, key=lambda model: model._criterion(sizes, times))

    @classmethod
    def _joined(cls, starts: Sequence[int], lines: Sequence[tuple[float, float]], distinct: Floats) -> "LinkModel":
        """Pieces that break where their lines meet between two sizes, or else half-way (by ratio) between the two."""
        pieces = [Piece(0.0, *lines[0])]
        for start, before, line in zip(starts[1:], lines, lines[1:], strict=False):
            low, high = distinct[start - 1], distinct[start]
            steeper = before[1] - line[1]
            meet = (line[0] - before[0]) / steeper if steeper else np.nan
            middle = math.sqrt(low * high) or high / 2
            pieces.append(Piece(float(meet if low < meet <= high else middle), *line))
        return cls(tuple(pieces))

    def _criterion(self, sizes: Floats, times: Floats) -> float:
        error = float(np.mean(np.log(near(self.seconds(sizes), times) / times) ** 2))
        free_numbers = 3 * len(self.pieces) - 1  # two for each line, and the breaks
        return len(sizes) * math.log(max(error, EQUAL_ENOUGH**2)) + free_numbers * math.log(len(sizes))


def checked(payload_bytes: ArrayLike, seconds: ArrayLike) -> tuple[Floats, Floats]:
    """Both as arrays, sorted by size.

    Raises:
        ValueError: see `LinkModel.fit`.
    """
    sizes, times = np.asarray(payload_bytes, float).ravel(), np.asarray(seconds, float).ravel()
    if len(sizes) != len(times) or not len(sizes):
        raise ValueError(f"{len(sizes)} payloads and {len(times)} times: there must be one of each, and at least one")
    if not (np.isfinite(sizes).all() and np.isfinite(times).all() and sizes.min() >= 0 and times.min() > 0):
        raise ValueError("payloads must be at least 0 bytes and times above 0 s, all of them finite")
    order = np.argsort(sizes, kind="stable")
    return sizes[order], times[order]


def best_splits(
    sizes: Floats, times: Floats, bounds: NDArray[np.int64], most_pieces: int
) -> list[tuple[list[int], list[tuple[float, float]]]]:
    """For each number of pieces the split with the least error: the number of each piece's first size, and its line.

    Args:
        bounds: Where in `sizes` each distinct size starts, and the length of `sizes`.
    """
    count = len(bounds) - 1
    shortest = min(FEWEST_SIZES, count)
    fits = {
        (start, end): fit_line(sizes[bounds[start] : bounds[end]], times[bounds[start] : bounds[end]])
        for start in range(count)
        for end in range(start + shortest, count + 1)
    }
    answers = []
    for pieces in range(1, most_pieces + 1):
        splits = (list(pairwise([0, *breaks, count])) for breaks in combinations(range(1, count), pieces - 1))
        allowed = [split for split in splits if all(part in fits for part in split)]
        if allowed:
            best = min(allowed, key=lambda split: sum(fits[part][1] for part in split))
            answers.append(([start for start, _ in best], [fits[part][0] for part in best]))
    return answers


def fit_line(sizes: Floats, times: Floats) -> tuple[tuple[float, float], float]:
    """Latency and seconds per byte, both at least 0, by Huber's loss of log ratios; and the sum of absolute log ratios.

    Gauss-Newton steps with reweighted least squares (Holland and Welsch, "Robust regression using iteratively
    reweighted least-squares", 1977). Each step is a linear fit around the prediction of the step before. In it, errors
    above `HUBER` times the median get a smaller weight. The first step is around the measured times.
    """
    from scipy.optimize import nnls  # importing it takes a second, which callers that only evaluate a model save

    scale = max(float(sizes.max()), 1.0)  # the two columns then have the same magnitude
    predicted, weights = times, np.ones_like(times)
    for _ in range(FIT_STEPS):
        rows = np.column_stack([1 / predicted, sizes / scale / predicted])
        (latency, slope), _ = nnls(weights[:, None] * rows, weights * (1 + np.log(times / predicted)))
        predicted = near(latency + slope * sizes / scale, times)
        errors = np.abs(np.log(predicted / times))
        allowed = max(HUBER * float(np.median(errors)), EQUAL_ENOUGH / 10)
        weights = np.sqrt(allowed / np.maximum(errors, allowed))
    return (float(latency), float(slope / scale)), float(errors.sum())


def near(predicted: Floats, times: Floats) -> Floats:
    """`predicted`, but at most a factor of `FARTHEST` from `times`."""
    return np.clip(predicted, times / FARTHEST, times * FARTHEST)


def held_out_error(payload_bytes: ArrayLike, seconds: ArrayLike, from_bytes: float = LARGE_BYTES) -> float:
    """Mean relative error, as a fraction, at sizes that were held out of the fit.

    The model is fitted to every other size, the largest one included, and predicts the rest.

    Args:
        from_bytes: Only held-out sizes of at least this many bytes count.

    Returns:
        nan if there is no such size, or too few are left to fit a piece to.

    Raises:
        ValueError: see `LinkModel.fit`.
    """
    sizes, times = checked(payload_bytes, seconds)
    fitted = np.unique(sizes)[::-1][::2]
    seen = np.isin(sizes, fitted)
    held_out = ~seen & (sizes >= from_bytes)
    if not held_out.any() or len(fitted) < FEWEST_SIZES:
        return float("nan")
    model = LinkModel.fit(sizes[seen], times[seen])
    return float(np.mean(np.abs(model.seconds(sizes[held_out]) / times[held_out] - 1)))
