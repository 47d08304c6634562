"""Whether runs differ: an estimate, its interval, and how sure it is. The unit is the run.

Steps of one run share conditions that change from run to run: where memory lies, which cores it gets, what else the
machine does. Two runs of one command differ by up to 5 % on an idle machine, and more steps do not help. So a run
counts once, by its median step, and the spread between runs that should be equal decides.

Few runs show that spread, so it is pooled with an expected one, which counts as much as
`EXPECTED_DEGREES` + 1 runs (Smyth, "Linear models and empirical Bayes methods for assessing differential expression in
microarray experiments", Statistical Applications in Genetics and Molecular Biology 3(1), 2004, section 3: the moderated
t-statistic). With one run a side, the expected spread is the only one, and the interval is wide.
"""

from collections.abc import Iterable, Sequence
from math import exp, log
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

EXPECTED_SPREAD = 0.04
"""Standard deviation of a run's median step between runs of one command, as a share of it. `ddp-lab bench aa` measures
it: 1.9 and 4.2 % in two series on two idle cores of a virtual machine."""
EXPECTED_DEGREES = 4
FEWEST_STEPS = 5
"""A median of fewer timed steps says nothing."""
LEVEL = 0.05


class Spread(NamedTuple):
    """How much equal runs differ.

    Attributes:
        variance: Of a run's value.
        degrees: Degrees of freedom of the variance; 0 if no equal runs are known.
    """

    variance: float
    degrees: float

    def together(self, other: "Spread") -> "Spread":
        """The two spreads pooled."""
        degrees = self.degrees + other.degrees
        sums = self.variance * self.degrees + other.variance * other.degrees
        return Spread(sums / degrees if degrees else 0.0, degrees)


NO_SPREAD = Spread(0.0, 0)


class Estimate(NamedTuple):
    """By how much two sides differ: NaN where that is unknown.

    Attributes:
        value: Mean of one side minus that of the other.
        low: Lower end of its 95 % interval.
        high: Upper end.
        p_value: Two-sided, of no difference.
    """

    value: float = np.nan
    low: float = np.nan
    high: float = np.nan
    p_value: float = np.nan

    def ratio(self) -> "Estimate":
        """Of logarithms, as a ratio."""
        return self._replace(value=exp(self.value), low=exp(self.low), high=exp(self.high))


def pooled(groups: Iterable[Sequence[float]]) -> Spread:
    """The spread within groups of equal runs; NaN is no run."""
    spread = NO_SPREAD
    for group in groups:
        values = np.asarray(group, dtype=float)
        values = values[~np.isnan(values)]
        if len(values) > 1:
            spread = spread.together(Spread(float(values.var(ddof=1)), len(values) - 1))
    return spread


def residuals(table: pd.DataFrame) -> pd.DataFrame:
    """What neither the row nor the column explains in a table of choices (rows) by passes (columns).

    A pass in which the whole machine is slower moves a column, and leaves nothing here.
    """
    complete = table.dropna(axis="columns")
    if complete.empty:
        return complete
    return complete.sub(complete.mean(axis="columns"), axis="index") - complete.mean() + complete.to_numpy().mean()


def spread_of(table: pd.DataFrame) -> Spread:
    """The spread of `residuals`."""
    unexplained = residuals(table)
    degrees = (unexplained.shape[0] - 1) * (unexplained.shape[1] - 1)
    return Spread(float((unexplained**2).to_numpy().sum() / degrees), degrees) if degrees > 0 else NO_SPREAD


def expected_spread(noise: float) -> Spread:
    """The spread to expect between runs whose values are known up to `noise`, a variance."""
    return Spread(EXPECTED_SPREAD**2 + noise, EXPECTED_DEGREES)


def estimate(value: float, runs: Sequence[int], spread: Spread) -> Estimate:
    """A difference of two means.

    Args:
        runs: How many are in each mean.
        spread: Of each run.
    """
    if np.isnan(value) or not spread.degrees or not all(runs):
        return Estimate(value)
    error = np.sqrt(spread.variance * sum(1 / count for count in runs))
    if not error:
        return Estimate(value, value, value, float(value == 0))
    low, high = stats.t.interval(1 - LEVEL, spread.degrees, value, error)
    return Estimate(value, float(low), float(high), float(2 * stats.t.sf(abs(value) / error, spread.degrees)))


def difference(old: Sequence[float], new: Sequence[float], spread: Spread = NO_SPREAD) -> Estimate:
    """How much larger `new` is than `old`, which have a value for each run. `spread`: of other equal runs."""
    value = float(np.mean(new) - np.mean(old)) if len(old) and len(new) else np.nan
    return estimate(value, (len(old), len(new)), pooled([old, new]).together(spread))


def log_ratio(times: pd.Series, base: pd.Series) -> float:
    """The logarithm of the ratio of two runs' step times: the median over the steps that were timed in both.

    Step k of two runs trains on the same samples, so steps are compared one by one. NaN below `FEWEST_STEPS`.
    """
    logs = logs_of(times, base)
    return float(logs.median()) if len(logs) >= FEWEST_STEPS else np.nan


def noise(times: pd.Series, base: pd.Series) -> float:
    """The variance of a run's median because its steps vary: half of that of `log_ratio`, if they are normal."""
    logs = logs_of(times, base)
    quartiles = logs.quantile([0.25, 0.75])
    deviation = float(quartiles.iloc[1] - quartiles.iloc[0]) / 1.349
    return np.pi / 2 * deviation**2 / len(logs) / 2 if len(logs) >= FEWEST_STEPS else 0.0


def logs_of(times: pd.Series, base: pd.Series) -> pd.Series:
    return (np.log(times) - np.log(base)).dropna()


def signs(estimates: Sequence[Estimate]) -> list[tuple[float, int]]:
    """For each estimate its p-value, corrected for the number of estimates, and whether it is below 0 (-1), above (1),
    or not known to be either (0)."""
    corrected = holm([result.p_value for result in estimates])
    return [
        (p_value, int(np.sign(result.value)) if p_value <= LEVEL else 0)
        for result, p_value in zip(estimates, corrected, strict=True)
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number; NaN stays NaN and does not count.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6(2),
    1979.
    """
    values = np.asarray(p_values, dtype=float)
    order = np.argsort(values, kind="stable")  # NaN last
    factors = np.count_nonzero(~np.isnan(values)) - np.arange(len(values))
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(values[order] * factors))
    return corrected.tolist()


def runs_needed(ratio: Estimate, runs: int) -> int | None:
    """About how many runs a side would tell a ratio of this size from chance; None if more than 20."""
    reach, value = log(ratio.high / ratio.low) / 2, log(ratio.value)
    if not value:
        return None
    needed = int(np.ceil(max(runs + 1, 1.5 * runs * (reach / value) ** 2)))
    return needed if needed <= 20 else None
