"""Comparisons of equal runs, and of runs of which some take longer."""

import pytest

from benchmarks.aa import GROUP, verdicts
from tests.traces import timed

MEDIANS = (0.1, 0.101, 0.099, 0.102, 0.1, 0.098)


@pytest.mark.parametrize(("runs", "percent", "right"), [(1, 0, 15), (GROUP, 0, 10), (GROUP, 8, 9), (1, 8, 0)])
def test_how_often_a_verdict_is_right(runs, percent, right):
    """Six runs make 15 pairs, and 10 pairs of three."""
    results = verdicts([timed("zero3", median) for median in MEDIANS], runs, percent)
    assert (results == (percent > 0)).sum() >= right and len(results) == (15 if runs == 1 else 10)
