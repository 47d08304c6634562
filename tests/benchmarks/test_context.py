"""Percent of ideal of attention that is cut over ranks."""

import pandas as pd

from benchmarks import context
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.mesh import CONTEXT_PARALLEL
from tests.checkpoints import here
from tests.parity import message_of
from tests.ranks import RankPool


def measured(heads: int, tokens: int) -> pd.DataFrame:
    return context.measured(heads, tokens, 1, here())


def test_each_way_is_timed_beside_the_whole(ranks: RankPool):
    for table in ranks.run(2, measured, 2, 64):
        assert table.way.tolist() == list(CONTEXT_PARALLEL)
        assert table.filter(regex="percent|ms_").gt(0).all(axis=None)


def test_what_ranks_do_not_divide_is_refused(ranks: RankPool):
    for heads, tokens, message in ((3, 64, "do not divide 3 attention heads"), (2, 6, "multiple of twice the 2 ranks")):
        assert all(message in text for text in ranks.run(2, message_of, UserError, measured, heads, tokens))
