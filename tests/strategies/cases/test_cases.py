"""Every case under every choice, in a loop of one's own: as in one process, or refused as listed."""

from functools import cache

import pytest

from tests.parity import in_own_loops
from tests.ranks import RankPool
from tests.strategies.cases import CASES, SUBJECTS, WRONG, refusal
from tests.strategies.cases.case import Choice, Outcome, in_one_process, on_a_rank
from tests.strategies.cases.outcomes import assert_equal

SMALL, USUAL = 0.0003, 25.0
"""MB of a bucket: 300 bytes, so that there are several; and one into which all fits."""


@in_own_loops
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize(
    ("world_size", "cap_mb"), [(2, SMALL), pytest.param(3, USUAL, marks=pytest.mark.exhaustive)], ids=str
)
def test_as_one_process(ranks: RankPool, choice: Choice, subject: str, world_size: int, cap_mb: float) -> None:
    for name in SUBJECTS[subject]:
        if (name, choice[1]) not in WRONG:  # PyTorch's own, which says nothing: docs/own-loop-limits.md
            check(ranks, name, choice, world_size, cap_mb)


def check(ranks: RankPool, name: str, choice: Choice, world_size: int, cap_mb: float) -> None:
    outcomes = ranks.run(world_size, on_a_rank_by_name, name, choice, cap_mb)
    wanted = refusal(name, choice[1])
    if wanted:
        assert all(isinstance(said, str) and wanted in said for said in outcomes), f"{name}: {outcomes}"
    else:
        assert_equal(name, outcomes, expected(name, world_size), CASES[name].tolerance)


def on_a_rank_by_name(name: str, choice: Choice, bucket_cap_mb: float) -> Outcome | str:
    return on_a_rank(CASES[name], choice, bucket_cap_mb)


@cache
def expected(name: str, world_size: int) -> Outcome:
    return in_one_process(CASES[name], world_size)
