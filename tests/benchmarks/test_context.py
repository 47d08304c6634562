"""Percent of ideal of attention that is cut over ranks."""

from unittest.mock import patch

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from benchmarks import context
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.mesh import CONTEXT_PARALLEL
from tests.parity import message_of
from tests.ranks import RankPool


def measured(heads: int, tokens: int) -> pd.DataFrame:
    return context.measured(
        heads, tokens, 1, Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    )


def with_given_times() -> pd.DataFrame:
    """Two rounds, in which the whole takes 100 and 120 ms."""
    times = pd.DataFrame({"whole": [100.0, 120.0]} | {way: [50.0, 80.0] for way in CONTEXT_PARALLEL})
    with patch.object(context, "time_rounds", lambda runs, rounds, ranks: times[list(runs)]):
        return measured(2, 4)


def test_each_way_is_timed_beside_the_whole(ranks: RankPool):
    for table in ranks.run(2, measured, 2, 64):
        assert table.way.tolist() == list(CONTEXT_PARALLEL)
        assert table.filter(regex="percent|ms_").gt(0).all(axis=None)


def test_ideal_is_the_whole_divided_by_the_ranks(ranks: RankPool):
    (table, _) = ranks.run(2, with_given_times)
    for row in table.to_dict("records"):
        assert row["percent_median"] == pytest.approx((100 + 75) / 2) and row["ideal_ms_median"] == 55
        assert (row["percent_p25"], row["percent_p75"]) == (81.25, 93.75)


def test_what_ranks_do_not_divide_is_refused(ranks: RankPool):
    for heads, tokens, message in ((3, 64, "do not divide 3 attention heads"), (2, 6, "multiple of twice the 2 ranks")):
        assert all(message in said for said in ranks.run(2, message_of, UserError, measured, heads, tokens))
