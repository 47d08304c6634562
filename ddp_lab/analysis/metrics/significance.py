"""Whether two runs differ: an estimate from pairs of equal steps, and how sure it is.

Step k of two runs trains on the same samples, so their values are compared step by step. Consecutive steps of a run are
not independent: a machine that is slow now is slow a moment later. So pairs are first averaged over batches of
consecutive pairs (batch means). About ten batches are enough for any number of pairs: longer batches gain more than
further batches (Schmeiser, "Batch size effects in the analysis of simulation output", Operations Research 30(3), 1982).

The batches are tested with Wilcoxon's signed-rank test. Estimate and interval are those of Hodges and Lehmann, which
belong to this test (Hollander, Wolfe and Chicken, "Nonparametric Statistical Methods", 3rd ed., sections 3.1 to 3.3).
In simulations with 31 pairs whose neighbours correlate by 0, 0.3 and 0.5, the test calls 5, 8 and 12 % of equal runs
different at p <= 0.05 (tests/analysis/metrics/test_significance.py).

The limit: no test of two runs sees that the whole machine was slower during one of them. `benchmarks/strategies.py`
avoids that by alternating choices inside one process group.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

SHORTEST_BATCH = 3
BATCHES = 10
FEWEST_BATCHES = 6
"""With fewer batches no data can give a two-sided p below 0.05: the least p is 2 / 2^n."""
FEWEST_PAIRS = SHORTEST_BATCH * FEWEST_BATCHES
LEVEL = 0.05


class Estimate(NamedTuple):
    """By how much pairs differ. The first four are NaN if there are too few pairs.

    Attributes:
        value: Hodges and Lehmann's estimate of the median difference.
        low: Lower end of its 95 % interval.
        high: Upper end.
        p_value: Of Wilcoxon's signed-rank test, two-sided.
        pairs: Number of pairs.
        batches: Number of batches that were tested.
    """

    value: float
    low: float
    high: float
    p_value: float
    pairs: int
    batches: int


def paired(differences: Sequence[float] | NDArray[np.float64]) -> Estimate:
    """Estimate the median of differences, given in the order in which they were measured."""
    values = np.asarray(differences, dtype=float)
    means = batch_means(values)
    if len(means) < FEWEST_BATCHES:
        return Estimate(np.nan, np.nan, np.nan, np.nan, len(values), len(means))
    rows, columns = np.triu_indices(len(means))
    averages = np.sort((means[rows] + means[columns]) / 2)
    outside = averages_outside(len(means))
    p_value = float(stats.wilcoxon(means).pvalue) if means.any() else 1.0
    low, high = float(averages[outside]), float(averages[-1 - outside])
    return Estimate(float(np.median(averages)), low, high, p_value, len(values), len(means))


def batch_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over batches of consecutive values. The first values are left out if they do not fill a batch."""
    length = max(SHORTEST_BATCH, len(values) // BATCHES)
    batches = len(values) // length
    return values[len(values) - batches * length :].reshape(batches, length).mean(axis=1)


def averages_outside(count: int) -> int:
    """How many of the sorted averages of two values lie below the 95 % interval (and as many above it).

    That is the largest k with P(T <= k) at most 2.5 %, where T sums those of 1 .. `count` that a fair coin picks.
    """
    ways = np.ones(1)
    for number in range(1, count + 1):
        ways = np.concatenate([ways, np.zeros(number)]) + np.concatenate([np.zeros(number), ways])
    return int(np.searchsorted(np.cumsum(ways) / 2.0**count, LEVEL / 2, side="right")) - 1


def paired_ratio(reference: pd.Series, values: pd.Series) -> Estimate:
    """The ratio of `values` to `reference`. Both are above 0 and indexed by step; a step that was not timed is NaN."""
    logs = (np.log(values) - np.log(reference)).dropna().sort_index()
    found = paired(logs.to_numpy())
    value, low, high = np.exp(found[:3]).tolist()
    return found._replace(value=value, low=low, high=high)


def directions(estimates: Sequence[Estimate], null: float) -> list[tuple[float, int | None]]:
    """For each estimate its p-value, corrected for the number of estimates, and the direction of the difference.

    Args:
        null: The value of no difference: 1 for ratios, 0 for differences.

    Returns:
        The direction is -1 below `null`, 1 above, 0 if no difference is seen, and None if there are too few pairs to
        see any difference.
    """
    corrected = holm([estimate.p_value for estimate in estimates])
    tests = sum(not np.isnan(estimate.p_value) for estimate in estimates)
    answers: list[tuple[float, int | None]] = []
    for estimate, p_value in zip(estimates, corrected, strict=True):
        if np.isnan(p_value) or tests * 2.0 ** (1 - estimate.batches) > LEVEL:
            answers.append((p_value, None))
        else:
            answers.append((p_value, int(np.sign(estimate.value - null)) if p_value <= LEVEL else 0))
    return answers


def fewest_pairs(tests: int) -> int:
    """How many pairs each of `tests` comparisons needs before `directions` can see any difference."""
    return SHORTEST_BATCH * max(FEWEST_BATCHES, math.ceil(1 + math.log2(max(tests, 1) / LEVEL)))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number; NaN stays NaN and does not count.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6(2),
    1979.
    """
    given = np.asarray(p_values, dtype=float)
    known = np.flatnonzero(~np.isnan(given))
    order = known[np.argsort(given[known], kind="stable")]
    corrected = np.full(len(given), np.nan)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(given[order] * np.arange(len(order), 0, -1)))
    return corrected.tolist()
