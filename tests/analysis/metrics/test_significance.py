"""The test of runs: against figures worked out by hand, scipy's t-test, and simulated runs."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ddp_lab.analysis.metrics.significance import (
    EXPECTED_SPREAD,
    NO_SPREAD,
    Estimate,
    Spread,
    difference,
    expected_spread,
    holm,
    log_ratio,
    noise,
    pooled,
    runs_needed,
    signs,
    spread_of,
)
from tests.tables import each_row

RUNS = st.lists(st.floats(-1, 1), min_size=2, max_size=6, unique=True)


@given(RUNS, RUNS)
def test_without_an_expected_spread_it_is_the_t_test(old, new):
    estimate, t_test = difference(old, new), stats.ttest_ind(new, old)
    if np.isfinite(t_test.pvalue) and np.ptp(old) > 1e-6 < np.ptp(new):
        assert estimate.p_value == pytest.approx(t_test.pvalue, abs=1e-9)
        interval = t_test.confidence_interval(0.95)
        assert (estimate.low, estimate.high) == pytest.approx((interval.low, interval.high))


def test_spreads_worked_out_by_hand():
    """0, 2 and 4, 6 each have variance 2 with one degree of freedom. In a table whose second row is 1 and 3 more, half
    of each corner is explained by neither row nor column, and one degree of freedom is left."""
    assert pooled([[0, 2], [4, 6], [9]]) == Spread(2, 2)
    assert Spread(2, 2).together(Spread(8, 1)) == Spread(4, 3) and NO_SPREAD.together(NO_SPREAD) == NO_SPREAD
    assert spread_of(pd.DataFrame([[0, 0], [1, 3]])) == Spread(1, 1)
    assert spread_of(pd.DataFrame([[0, 5, 1], [2, 7, np.nan]])) == Spread(0, 1), "a slow pass is no spread"
    assert spread_of(pd.DataFrame([[0], [1]])).degrees == spread_of(pd.DataFrame([[np.nan], [1]])).degrees == 0


def test_one_run_a_side_has_the_expected_spread_alone():
    """2.776 is the quantile of Student's t with four degrees of freedom."""
    estimate = difference([0.0], [0.1], expected_spread(0))
    assert estimate.high - estimate.value == pytest.approx(2.776 * 2**0.5 * EXPECTED_SPREAD, rel=1e-3)
    assert estimate.low < 0 and np.isnan(difference([0.0], [0.1]).low) and np.isnan(difference([], [0.1]).value)


@each_row("runs, planted, least, most", [(1, 0, 0, 0.05), (3, 0, 0, 0.05), (3, 0.08, 0.8, 1), (1, 0.3, 0.8, 1)])
@each_row("between", [0.01, 0.02])
def test_simulated_runs(runs, planted, least, most, between):
    """How often equal runs are told apart, and how often what is planted is found."""
    draw, verdicts = np.random.default_rng(5), []
    for _ in range(400):
        old, new = draw.normal([[0], [planted]], between, (2, runs))
        ((_, sign),) = signs([difference(old, new, expected_spread(0))])
        verdicts.append(sign != 0)
    assert least <= np.mean(verdicts) <= most + 0.02


def test_runs_are_compared_step_by_step():
    """Every step is a tenth slower, though each run's own steps vary tenfold, and each misses one."""
    steps = pd.Series(np.geomspace(10, 100, 30), index=range(1, 31))
    slower = 1.1 * steps.drop(7)[::-1]
    assert np.exp(log_ratio(slower, steps.drop(3))) == pytest.approx(1.1) and noise(slower, steps) < 1e-20
    assert np.isnan(log_ratio(steps[:4], steps)) and noise(steps[:4], steps) == 0


def test_the_median_of_noisy_steps_is_noisy():
    """The variance of a median of n normal values is pi / 2 of that of their mean."""
    draw = np.random.default_rng(1)
    base, second = (pd.Series(np.exp(draw.normal(0, 0.1, 10_000))) for _ in "12")
    assert noise(second, base) == pytest.approx(np.pi / 2 * 0.1**2 / 10_000, rel=0.1)


def test_holm_worked_out_by_hand():
    """The least times 3, the next times 2 but no less than that, the largest as it is but no less than both."""
    corrected = holm([0.04, float("nan"), 0.01, 0.03])
    assert corrected[0] == corrected[3] == pytest.approx(0.06) and corrected[2] == pytest.approx(0.03)
    assert np.isnan(corrected[1]) and holm([]) == [] and holm([0.6, 0.7]) == [1.0, 1.0]
    assert signs([Estimate(-1, -2, 0, 0.01), Estimate(1, 0, 2, 0.04), Estimate(), Estimate(3, 2, 4, 0.001)]) == [
        (0.02, -1),
        (0.04, 1),
        (pytest.approx(np.nan, nan_ok=True), 0),
        (0.003, 1),
    ]


def test_runs_that_would_tell():
    """An interval twice as wide as the difference takes four times the runs, and half as many again to be safe."""
    assert runs_needed(Estimate(np.exp(0.1), np.exp(-0.1), np.exp(0.3)), 2) == 12
    assert runs_needed(Estimate(1.001, 0.9, 1.1), 2) is None and runs_needed(Estimate(1.0, 0.9, 1.1), 2) is None
