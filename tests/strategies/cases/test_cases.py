"""Cases in a loop of one's own: as in one process, or refused as listed.

By default zero3 runs every second case, and each other choice every sixteenth, in turn. Every choice runs the cases of
`KEY`. Every sixteenth case of a hand-written choice runs on three ranks with tiny buckets.
"""

from functools import cache

import pytest

from tests.parity import IN_OWN_LOOPS, in_own_loops
from tests.ranks import RankPool
from tests.strategies.cases import CASES, SUBJECTS, WRONG, refusal
from tests.strategies.cases.case import LoopOutcome, in_one_process, on_a_rank
from tests.strategies.cases.outcomes import assert_equal

TINY, SMALL, USUAL = 0.00002, 0.0003, 25.0
"""MB of a bucket: less than most parameters have; 300 bytes, for several buckets; and enough for all parameters."""


KEY = {"accumulation, control flow by rank", "zeros for a block that is passed over"}


@in_own_loops
@pytest.mark.parametrize("subject", SUBJECTS)
def test_as_one_process(ranks: RankPool, choice, subject):
    for name in SUBJECTS[subject]:
        turn = list(CASES).index(name) - IN_OWN_LOOPS.index(choice)
        if name in KEY or turn % (2 if choice == "zero3" else 16) == 0:
            is_cut_more = turn % 16 == 0 and not choice.startswith("pytorch")
            check(ranks, name, choice, *((3, TINY) if is_cut_more else (2, SMALL)))


@pytest.mark.exhaustive
@in_own_loops
@pytest.mark.parametrize("subject", SUBJECTS)
def test_all_as_one_process(ranks: RankPool, choice, subject):
    for index, name in enumerate(SUBJECTS[subject]):
        check(ranks, name, choice, *((2, SMALL), (3, USUAL))[index % 2])


def check(ranks: RankPool, name: str, choice: str, world_size: int, cap_mb: float):
    if (name, choice) in WRONG:  # PyTorch's own, which says nothing: docs/own-loop.md
        return
    outcomes = ranks.run(world_size, on_a_rank_by_name, name, choice, cap_mb)
    message = refusal(name, choice)
    if message:
        assert all(isinstance(outcome, str) and message in outcome for outcome in outcomes), f"{name}: {outcomes}"
    else:
        assert_equal(name, outcomes, expected(name, world_size), CASES[name].tolerance)


def on_a_rank_by_name(name: str, choice: str, bucket_cap_mb: float) -> LoopOutcome | str:
    return on_a_rank(CASES[name], choice, bucket_cap_mb)


@cache
def expected(name: str, world_size: int) -> LoopOutcome:
    return in_one_process(CASES[name], world_size)
