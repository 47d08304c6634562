"""What chooses cases leaves nothing out: covering arrays, and values that are tried in one case."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.covering import pairwise
from tests.tables import each_row

FACTORS = st.lists(st.integers(1, 4), min_size=2, max_size=5).map(
    lambda sizes: {f"factor {index}": list(range(size)) for index, size in enumerate(sizes)}
)


def pairs(row):
    return set(itertools.combinations(row.items(), 2))


@given(FACTORS, st.integers(2, 9))
def test_each_pair_that_is_allowed_occurs(factors, most):
    def is_allowed(row):
        return sum(row.values()) <= most

    rows = pairwise(factors, is_allowed)
    candidates = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    expected = set().union(*(pairs(row) for row in candidates if is_allowed(row)))
    assert all(is_allowed(row) and row.keys() == factors.keys() for row in rows)
    assert set().union(*map(pairs, rows)) == expected


def test_pairs_need_few_rows():
    rows = pairwise({name: range(3) for name in "abcd"})
    assert len(rows) <= 12, "of 81; 9 at least"
    assert rows == pairwise({name: range(3) for name in "abcd"})


def test_each_value_that_fails_is_named():
    @each_row("value, expected", [(1, 1), (2, 3), (4, 5)])
    def check_equal(value, expected):
        assert value == expected

    with pytest.raises(AssertionError, match=r"2 of 3 rows fail:\n\{'value': 2, 'expected': 3\}") as caught:
        check_equal()
    assert "'value': 4" in str(caught.value)
