"""The paired test: against figures worked out by hand, brute force over all signs, and simulated runs."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_lab.analysis.metrics.significance import (
    Estimate,
    averages_outside,
    batch_means,
    directions,
    holm,
    paired,
    paired_ratio,
)
from tests.tables import each_row


def test_an_estimate_worked_out_by_hand():
    """18 pairs make six batches of three, whose means are 1 to 6. Their 21 averages of two lie evenly around 3.5. All
    are above 0, which chance does in 2 of 64 cases; a narrower interval than from the least to the largest would miss
    in 4 of 64."""
    values = np.repeat([4.0, 1.0, 6.0, 2.0, 5.0, 3.0], 3) + np.tile([-0.5, 0.0, 0.5], 6)
    assert batch_means(values).tolist() == [4, 1, 6, 2, 5, 3]
    assert paired(values) == Estimate(3.5, 1.0, 6.0, 2 / 64, pairs=18, batches=6)


def test_batches_are_of_consecutive_pairs_and_the_first_are_left_out():
    assert batch_means(np.arange(20.0)).tolist() == [3, 6, 9, 12, 15, 18]  # 2 .. 4, 5 .. 7, ...
    assert len(batch_means(np.arange(35.0))) == 11 and len(batch_means(np.arange(1000.0))) == 10


@each_row("count", [6, 9, 12])
def test_the_interval_misses_in_at_most_5_percent_of_all_signs(count):
    """By brute force: signs of 1 .. count at random, the sum of the positive ones."""
    sums = np.array([np.dot(signs, range(1, count + 1)) for signs in product((0, 1), repeat=count)])
    outside = averages_outside(count)
    assert (sums <= outside).mean() <= 0.025 < (sums <= outside + 1).mean()


@settings(max_examples=8)
@given(st.lists(st.floats(-5, 5), min_size=6, max_size=12, unique=True), st.floats(-5, 5))
def test_interval_and_p_value_say_the_same(means, shift):
    """The interval holds the shifts that the test does not reject."""
    values = np.repeat(means, 3)
    found, shifted = paired(values), paired(values - shift)
    averages = np.add.outer(means, means) / 2
    if np.abs(averages - shift).min() > 1e-9 and len(np.unique(np.abs(np.array(means) - shift))) == len(means):
        assert (shifted.p_value > 0.05) == (found.low < shift < found.high)


def test_holm_worked_out_by_hand():
    """The least times 3, the next times 2 but no less than that, the largest as it is but no less than both."""
    corrected = holm([0.04, float("nan"), 0.01, 0.03])
    assert corrected[0] == corrected[3] == pytest.approx(0.06) and corrected[2] == pytest.approx(0.03)
    assert np.isnan(corrected[1]) and holm([]) == [] and holm([0.6, 0.7]) == [1.0, 1.0]


def test_what_no_data_could_show_is_unknown():
    """Six batches give no p below 2 / 64. For one comparison that is enough, for two it is not, nor for none."""
    slower, none = paired(np.repeat(np.arange(1.0, 7), 3)), paired(np.ones(3))
    assert directions([slower, none], null=0.0)[0] == (2 / 64, 1)
    assert [sign for _, sign in directions([slower, slower], null=0.0)] == [None, None]
    assert directions([none], null=0.0)[0][1] is None
    level = paired(np.tile([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], 6))
    assert directions([level], null=0.0)[0][1] == 0


def test_ratios_are_paired_by_step():
    """Every step is a tenth slower, though each run's own steps vary tenfold, and each misses one."""
    steps = pd.Series(np.geomspace(10, 100, 30), index=range(1, 31))
    found = paired_ratio(steps.drop(3), 1.1 * steps.drop(7)[::-1])
    assert found.pairs == 28 and found[:3] == pytest.approx((1.1, 1.1, 1.1)) and found.p_value < 0.01
