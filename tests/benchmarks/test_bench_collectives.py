"""The collective benchmark: real ranks over Gloo, planted faults, files that survive, and the page."""

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import collectives
from benchmarks.collective import operations
from benchmarks.collective.results import COLUMNS, make_row
from benchmarks.collective.sizes import Measured
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.link.speed import Link
from tests import collective_ranks as planted
from tests.ranks import RankPool
from tests.tables import each_row

ROOT = Path(__file__).parents[2]
RANKS = 3
TYPES = ["fp32", "bf16", "fp16"]
CPU = planted.CPU


@pytest.fixture(scope="module")
def measured(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of everything at two sizes in every dtype."""
    folder = tmp_path_factory.mktemp("collectives")
    ranks.run(RANKS, planted.bench, folder, ["--dtypes", ",".join(TYPES)])
    return folder / f"gloo_cpu_{RANKS}_ranks.csv"


def rows_of(path: Path) -> pd.DataFrame:
    return pd.read_csv(path)


def test_everything_is_measured_and_right(measured: Path) -> None:
    rows = rows_of(measured)
    assert rows.columns.tolist() == list(COLUMNS)
    assert rows["collective"].drop_duplicates().tolist() == list(collectives.COLLECTIVES) == list(operations.OPERATIONS)
    sized = rows[rows["collective"] != "barrier"]
    counts = sized.groupby(["collective", "type"]).size()
    assert (counts == 2).all()
    assert set(sized["type"]) == set(TYPES) and (sized["wrong"] == 0).all() and (rows["iterations"] == 4).all()
    assert (rows["p50_us"] > 0).all() and (rows["p50_us"] <= rows["p95_us"]).all()
    (barrier,) = rows[rows["collective"] == "barrier"].to_dict("records")
    assert barrier["size_bytes"] == 0 and pd.isna(barrier["wrong"]) and pd.isna(barrier["busbw_gb_per_s"])


def test_bandwidths_by_hand() -> None:
    """10^6 bytes in a mean of 1 ms are 1 GB/s; for the all-reduce of 4 ranks, times 2 * 3/4."""
    ranks = Ranks(0, 4, CPU, "gloo")
    of_all = Measured("all_reduce", "fp32", "sum", 10**6, 250_000, [0.0005, 0.0005, 0.002], 0)
    row = make_row(of_all, ranks, Link(10**9))
    expected = {"time_us": 1000, "p50_us": 500, "algbw_gb_per_s": 1, "busbw_gb_per_s": 1.5, "spread_pct": 150}
    assert {name: row[name] for name in expected} == pytest.approx(expected) and row["link_bits_per_s"] == 1e9
    for name, factor in (("sharding.reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 1)):
        assert make_row(replace(of_all, collective=name), ranks)["busbw_gb_per_s"] == pytest.approx(factor), name


def test_a_wrong_result_is_seen(ranks: RankPool, tmp_path: Path) -> None:
    flags = ["--collectives", "all_reduce", "--sizes", "1000"]
    ranks.run(2, planted.bench, tmp_path, flags, planted.three_elements)
    path = tmp_path / "gloo_cpu_2_ranks.csv"
    assert rows_of(path)["wrong"].item() == 3, "on one of two ranks"


def test_a_lost_rank_leaves_what_was_measured(ranks: RankPool, tmp_path: Path) -> None:
    flags = ["--collectives", "all_reduce,reduce", "--sizes", "1K,4K"]
    for rank, (message,) in enumerate(ranks.run(2, planted.bench, tmp_path, flags, planted.connection_lost)):
        assert f"rank {rank} lost another one at reduce fp32 of 1 KiB: Connection closed by peer; what" in message
    path = tmp_path / "gloo_cpu_2_ranks.csv"
    assert rows_of(path)["collective"].tolist() == ["all_reduce"] * 2


@each_row(
    ("flags", "expected"),
    [
        (["--collectives", "all_reduce,al_gather"], "unknown collective 'al_gather'; did you mean all_gather"),
        (["--dtypes", "fp23"], "unknown dtype 'fp23'; did you mean"),
        (["--min-bytes", "1X"], "--min-bytes: '1X' is not a size"),
        (["--sizes", "1K,-4"], "--sizes: '-4' is not a size"),
        (["--min-bytes", "1M", "--max-bytes", "1K"], "--max-bytes 1024: must not be below --min-bytes 1048576"),
        (["--factor", "1"], "--factor: 1: must be a number of at least 1.01"),
        (["--iterations", "0"], "--iterations: 0: must be a whole number of at least 1"),
        (["--in-a-row", "x"], "--in-a-row: x: must be a whole number of at least 1"),
        (["--seconds-per-size", "nan"], "must be a number of at least 0.001"),
        (["--world", "2"], "unrecognized arguments: --world"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        collectives.parse(flags)
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and expected in said.err


def test_flags_and_columns_are_documented() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    section = text.split("## `benchmarks/collectives.py`")[1].split("\n## ")[0]
    flags = [action.option_strings[-1] for action in collectives.build_parser()._actions]
    assert re.findall(r"^\| `(--[^`]+)` \|", section, re.MULTILINE) == flags[1:]
    columns = re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", section, re.MULTILINE)
    assert columns == list(COLUMNS.items())
