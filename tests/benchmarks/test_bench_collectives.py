"""The collective benchmark: real ranks over Gloo, planted faults, files that survive, and the page."""

import re
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import collectives
from tests import collective_ranks as planted
from tests.command_page import flags_in, section
from tests.ranks import RankPool


def rows_of(folder: Path, ranks: int) -> pd.DataFrame:
    return pd.read_csv(folder / collectives.REPORTS / f"gloo_cpu_{ranks}_ranks.csv")


def test_everything_is_measured_and_right(ranks: RankPool, tmp_path):
    """And bandwidths are as by hand: bytes over the median, times nccl-tests' factor for three ranks."""
    ranks.run(3, planted.bench, tmp_path, ["--dtypes", ",".join(collectives.DTYPES)])
    rows = rows_of(tmp_path, 3)
    assert rows.columns.tolist() == list(collectives.COLUMNS)
    assert rows["collective"].drop_duplicates().tolist() == list(collectives.CALLS)
    assert rows.groupby(["collective", "type"])["size_bytes"].nunique().tolist() == [2] * 3 * len(collectives.CALLS)
    assert (rows["wrong"] == 0).all() and (rows["calls"] >= 3).all() and (rows["p50_us"] <= rows["p95_us"]).all()
    factors = rows["busbw_gb_per_s"] * rows["p50_us"] * 1000 / rows["size_bytes"]
    expected = {"all_reduce": 4 / 3, "broadcast": 1.0}
    assert factors.tolist() == pytest.approx([expected.get(name, 2 / 3) for name in rows["collective"]])


def test_a_wrong_result_is_seen(ranks: RankPool, tmp_path):
    ranks.run(2, planted.bench, tmp_path, ["--collectives", "all_reduce", "--sizes", "1000"], planted.three_elements)
    assert rows_of(tmp_path, 2)["wrong"].item() == 3, "on one of two ranks"


def test_a_lost_rank_leaves_what_was_measured(ranks: RankPool, tmp_path):
    flags = ["--collectives", "all_reduce,broadcast", "--sizes", "1K,4K"]
    for rank, message in enumerate(ranks.run(2, planted.bench, tmp_path, flags, planted.connection_lost)):
        assert f"rank {rank} stopped at broadcast fp32 of 1,024 bytes: Connection closed by peer; what" in message
    assert rows_of(tmp_path, 2)["collective"].tolist() == ["all_reduce"] * 2


def test_flags_and_columns_are_documented():
    text = section("benchmarks/collectives.py")
    flags = [action.option_strings[0] for action in collectives.build_parser()._actions]
    assert flags_in(text) == flags[1:]
    columns = re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", text, re.MULTILINE)
    assert columns == list(collectives.COLUMNS.items())
