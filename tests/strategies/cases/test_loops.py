"""Freezing, schedules, optimizers and whatever else loops do."""

import pytest

from tests.parity import in_own_loops
from tests.ranks import RankPool
from tests.strategies.cases.case import Choice
from tests.strategies.cases.check import check
from tests.strategies.cases.loops import CASES


@in_own_loops
@pytest.mark.parametrize("name", CASES)
def test_as_one_process(ranks: RankPool, choice: Choice, name: str) -> None:
    check(ranks, name, choice)
