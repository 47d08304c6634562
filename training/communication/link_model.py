"""The cost of a collective by its payload: measured times in, a function of bytes out.

The alpha-beta model says that a message takes a latency and then a time for each byte (Hockney, "The communication
challenge for MPP", 1994). Libraries change algorithm with size, and caches end somewhere, so one pair of numbers holds
over a range of sizes only: `LinkModel` is one pair for each such range. It knows nothing of processes or of torch, so
what it predicts can be tested with numbers alone.

    model = LinkModel.fit(payload_bytes=[1e3, 1e4, 1e5, 1e6, 1e7], seconds=[5e-5, 6e-5, 1.5e-4, 1e-3, 9e-3])
    model.seconds(25 * 2**20)                                 # of one payload
    model.seconds(np.array([1e6, 2e6])).sum()                 # or of many at once
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

FEWEST_SIZES = 3
"""Distinct sizes that a piece must explain, one more than it has numbers to fit."""
EQUAL_ENOUGH = 0.01
"""A relative error below which a better fit is no reason for one more piece: clocks and machines are no better."""
FARTHEST = 4.0
"""A time that is further off than by this factor, such as of a machine that stood still, counts as if it were not."""
FIT_STEPS = 10
HUBER = 1.345 * 1.4826
"""Times the median of absolute errors: beyond that, an error counts less. Of normal ones, the fit is as sure as that of
95 % as many measurements by least squares (Huber, "Robust Statistics", 1981)."""
LARGE_BYTES = 10**6
"""From here on the bandwidth rather than the latency decides, and the error of a fit is stated."""


@dataclass(frozen=True)
class Piece:
    """From `from_bytes` on, to the next piece, a payload of n bytes takes `latency_s + n * seconds_per_byte`."""

    from_bytes: float
    latency_s: float
    seconds_per_byte: float

    def seconds(self, payload_bytes: ArrayLike) -> Floats:
        return self.latency_s + self.seconds_per_byte * np.asarray(payload_bytes, float)


@dataclass(frozen=True)
class LinkModel:
    """Seconds that a collective takes, by the bytes of its payload (nccl-tests' definition of size).

    More bytes never take less time: where a piece would begin below the end of the one before, the time stays at that
    end until the piece has caught up.

    Attributes:
        pieces: The first begins at 0 bytes, each further one later than the one before.

    Raises:
        ValueError: pieces in another order, or a number in them that is negative or not finite.
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
        """Predicted seconds of payloads of any shape, in the same shape.

        Raises:
            ValueError: a payload below 0 bytes, or none at all (nan).
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
        """Lines by Huber's loss of log ratios to the times (`fit_line`), so that small payloads count as much as large
        ones, and a few that no line explains, such as what a shaper lets through at once, do not pull the others off.

        All places of the breaks between them are tried, which takes a fit for each pair of distinct sizes: those of the
        least absolute log ratios count. Of 1 to `most_pieces` pieces, it is the number with the least Bayesian
        information criterion (Schwarz, "Estimating the dimension of a model", 1978), by squared log ratios, errors of
        less than `EQUAL_ENOUGH` counted as that.

        Args:
            payload_bytes: At least one; a size may be there several times.
            seconds: What each took, such as the median over its repetitions.
            most_pieces: At least 1.

        Raises:
            ValueError: not the same number of both, none at all, sizes below 0 or times of 0 or less.
        """
        sizes, times = checked(payload_bytes, seconds)
        distinct, first = np.unique(sizes, return_index=True)
        bounds = np.append(first, len(sizes))
        candidates = [cls._joined(*split, distinct) for split in best_splits(sizes, times, bounds, most_pieces)]
        return min(candidates, key=lambda model: model._criterion(sizes, times))

    @classmethod
    def _joined(cls, starts: Sequence[int], lines: Sequence[tuple[float, float]], distinct: Floats) -> "LinkModel":
        """Pieces whose breaks lie where their lines meet, or half-way (by ratio) between two sizes if not there."""
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
        free_numbers = 3 * len(self.pieces) - 1  # two of each line, and the breaks
        return len(sizes) * math.log(max(error, EQUAL_ENOUGH**2)) + free_numbers * math.log(len(sizes))


def checked(payload_bytes: ArrayLike, seconds: ArrayLike) -> tuple[Floats, Floats]:
    """Both as arrays in order of size.

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
    """For 1 to `most_pieces` pieces: with which distinct size each piece begins, and its line, at least error overall.

    Args:
        bounds: Where in `sizes` each distinct size begins, and the length of `sizes`.
    """
    count = len(bounds) - 1
    shortest = min(FEWEST_SIZES, count)
    error: dict[tuple[int, int], float] = {}
    line: dict[tuple[int, int], tuple[float, float]] = {}
    for start in range(count):
        for end in range(start + shortest, count + 1):
            part = slice(bounds[start], bounds[end])
            line[start, end], error[start, end] = fit_line(sizes[part], times[part])
    best = {end: (error[0, end], [0]) for end in range(shortest, count + 1)}
    answers = []
    for pieces in range(1, most_pieces + 1):
        if pieces > 1:
            best = {
                end: min(
                    (best[start][0] + error[start, end], [*best[start][1], start])
                    for start in best
                    if start + shortest <= end
                )
                for end in range(pieces * shortest, count + 1)
            }
        if count in best:
            starts = best[count][1]
            answers.append((starts, [line[part] for part in pairwise([*starts, count])]))
    return answers


def fit_line(sizes: Floats, times: Floats) -> tuple[tuple[float, float], float]:
    """Latency and seconds a byte, both at least 0, by Huber's loss of log ratios; and absolute log ratios, summed.

    Gauss and Newton's method with reweighted least squares (Holland and Welsch, "Robust regression using iteratively
    reweighted least-squares", 1977): each step is a linear fit around what the last one predicted, in which what was
    off by more than `HUBER` times the median counts by as much less. The first is around the times themselves, which
    alone would favour the low ones among them.
    """
    from scipy.optimize import nnls  # takes a second, which those who only evaluate a model can do without

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


def held_out_error(
    payload_bytes: ArrayLike, seconds: ArrayLike, from_bytes: float = LARGE_BYTES, most_pieces: int = 3
) -> float:
    """Mean relative error, as a fraction, at sizes that the model has not seen.

    The model is fitted on every other size, the largest among them, and asked for the rest.

    Args:
        from_bytes: Only sizes of at least this many bytes are asked for.

    Returns:
        nan if there is no such size to hold out, or too few are left to fit a piece to.

    Raises:
        ValueError: see `LinkModel.fit`.
    """
    sizes, times = checked(payload_bytes, seconds)
    fitted = np.unique(sizes)[::-1][::2]
    seen = np.isin(sizes, fitted)
    asked = ~seen & (sizes >= from_bytes)
    if not asked.any() or len(fitted) < FEWEST_SIZES:
        return float("nan")
    model = LinkModel.fit(sizes[seen], times[seen], most_pieces)
    return float(np.mean(np.abs(model.seconds(sizes[asked]) / times[asked] - 1)))
