"""The collective benchmark: real ranks over Gloo, planted faults, files that survive, and the page."""

import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import torch

from benchmarks import collectives
from benchmarks.collective import operations
from benchmarks.collective.loop import Bench
from benchmarks.collective.results import COLUMNS, Results, make_row, model_text
from benchmarks.collective.sizes import Measured, parse_size, size_range, size_text
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.link.link_model import LinkModel
from ddp_lab.runtime.link.speed import Link
from scripts import bench_collectives as script
from tests import collective_ranks as planted
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
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


def test_sizes_and_counts_are_those_of_nccl_tests(measured: Path) -> None:
    """1000 bytes of bf16 are 500 elements; divided over 3 ranks, 166 a rank and 996 bytes in all."""
    rows = rows_of(measured).query("type == 'bf16'").set_index("collective")
    smallest = rows[(rows["size_bytes"] <= 1000) & ~rows.index.duplicated()]
    for name, operation in operations.OPERATIONS.items():
        if name != "barrier":
            expected = [996, 166] if operation.is_divided else [1000, 500]
            assert smallest.loc[name, ["size_bytes", "count"]].tolist() == expected, name
    assert set(smallest[smallest["redop"] == "sum"].index) == {n for n in smallest.index if "reduce" in n}


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


def test_no_number_and_swapped_parts_are_wrong() -> None:
    ranks = Ranks(0, 2, CPU, "gloo")
    full = torch.empty(250)
    parts = operations.parts_of_ranks(full, ranks)
    call = operations.Call(inputs=parts, expected=parts)
    call.fill()
    assert call.count_wrong() == 0
    full[0] = float("nan")
    assert call.count_wrong() == 1
    call.fill()
    full.copy_(full.roll(125))
    assert 200 <= call.count_wrong() <= 250


LITTLE = ["reduce fp32 of 70 KiB on 2 ranks: needs 77 KiB a rank, and one has only 43.95 KiB"]
UNSUPPORTED = [f"reduce fp32 of {size} on 2 ranks: rank 0: no such thing" for size in ("1000 B", "70 KiB")]


@pytest.mark.parametrize(("plant", "expected"), [(planted.little_memory, LITTLE), (planted.unsupported, UNSUPPORTED)])
def test_what_cannot_be_is_skipped(
    ranks: RankPool, tmp_path: Path, plant: Callable[[int], Any], expected: list[str]
) -> None:
    skipped, _ = ranks.run(2, planted.bench, tmp_path, ["--collectives", "reduce,barrier"], plant)
    assert skipped == expected
    assert "barrier" in rows_of(tmp_path / "gloo_cpu_2_ranks.csv")["collective"].tolist()


def test_a_lost_rank_leaves_what_was_measured(ranks: RankPool, tmp_path: Path) -> None:
    flags = ["--collectives", "all_reduce,reduce", "--sizes", "1K,4K"]
    for rank, (message,) in enumerate(ranks.run(2, planted.bench, tmp_path, flags, planted.connection_lost)):
        assert f"rank {rank} lost another one at reduce fp32 of 1 KiB: Connection closed by peer; what" in message
    path = tmp_path / "gloo_cpu_2_ranks.csv"
    assert rows_of(path)["collective"].tolist() == ["all_reduce"] * 2


def test_calls_in_a_row_count_by_their_mean_and_use_tensors_in_turn() -> None:
    """Of 8 MiB in all: four tensors of 2 MiB, but never more than 64."""
    bench = object.__new__(Bench)
    bench._options, bench._control = Namespace(spread=8 * 2**20), mock.Mock()
    bench._ranks, first, second = Ranks(0, 1, CPU, "gloo"), mock.Mock(), mock.Mock()
    with mock.patch("torch.distributed.barrier") as barrier, mock.patch("time.perf_counter", side_effect=[1.0, 2.5]):
        assert bench._timed(cycle([first, second]), in_a_row=3) == 0.5
    assert (first.run.call_count, second.run.call_count, barrier.call_count) == (2, 1, 1)
    assert [bench._copies(size) for size in (2 * 2**20, 5 * 2**20, 64 * 2**20, 1, 0)] == [4, 2, 1, 64, 64]


def test_small_calls_follow_each_other_on_a_gpu() -> None:
    bench = object.__new__(Bench)
    for device, expected in (("cpu", [1, 1, 1]), ("cuda", [20, 4, 1])):
        bench._ranks = Ranks(0, 2, torch.device(device), "gloo")
        assert [bench._calls_in_a_row(seconds) for seconds in (1e-6, 2.4e-4, 1.0)] == expected


def test_sums_are_exact_in_bf16_for_any_number_of_ranks() -> None:
    for world_size in (2, 7, 64, 256, 300):
        total = operations.pattern_of_sum(torch.float32, Ranks(0, world_size, CPU, "gloo"))
        assert 1 < total.max() <= operations.LARGEST_EXACT
        operations.pattern_of.cache_clear()


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("1K", 1024), ("4MiB", 2**22), ("1g", 2**30), ("1.5K", 1536)]
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size and parse_size(size_text(size)) == size


def test_ranges() -> None:
    assert size_range(1024, 16 * 1024, 4) == [1024, 4096, 16384] and size_range(10, 10, 2) == [10]
    assert planted.options("--sizes", "4M,1K,4M").sizes == [1024, 2**22]


@pytest.mark.parametrize(
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
        (["--ranks", "2,x"], "--ranks: 2,x: must be whole numbers above 0"),
        (["--ranks", "0"], "--ranks: 0: must be whole numbers above 0"),
        (["--world", "2"], "unrecognized arguments: --world"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_collectives.py", *flags])
    monkeypatch.setattr(script, "measure", lambda *_: pytest.fail("nothing may be started"))
    try:
        code = script.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    assert code in (1, 2) and said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and expected in said.err


def test_flags_and_columns_are_documented() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    for title, parser in (
        ("## `benchmarks/collectives.py`", collectives.build_parser()),
        ("## `scripts/bench_collectives.py`", script.build_parser()),
    ):
        section = text.split(title)[1].split("\n## ")[0]
        flags = [action.option_strings[-1] for action in parser._actions]
        assert re.findall(r"^\| `(--[^`]+)` \|", section, re.MULTILINE) == flags[1:], title
    section = text.split("## `benchmarks/collectives.py`")[1].split("\n## ")[0]
    columns = re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", section, re.MULTILINE)
    assert columns == list(COLUMNS.items())


def test_a_line_through_the_medians_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path / "table.csv", Ranks(0, 2, CPU, "gloo"), None)
    for size in (2**power for power in range(10, 31, 2)):
        results.add(Measured("all_reduce", "fp32", "sum", size, size // 4, [1e-4 + 1e-9 * size], 0))
    results.end("all_reduce", "fp32")
    assert "model: 100 us + 1 ns/B" in capsys.readouterr().out
    assert model_text(LinkModel(2e-3, 3e-9)) == "2.00 ms + 3 ns/B"


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """The script in a process group of its own, as a terminal has it; returns once something has been measured."""
    command = [sys.executable, "scripts/bench_collectives.py", "--output-dir", str(folder), "--collectives"]
    process = subprocess.Popen(
        [*command, "all_reduce,reduce", "--seconds-per-size", "0.5", *flags],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    path, deadline = folder / "reports" / "collectives" / "gloo_cpu_2_ranks.csv", time.monotonic() + TIMEOUT_S
    while not (path.exists() and len(pd.read_csv(path)) >= 2):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=5)
        time.sleep(0.05)
    return process


def workers(folder: Path) -> list[int]:
    """Ranks that were started for `folder`, by process id."""
    found = [
        subprocess.run(["pgrep", "-f", f"{name}.*{folder}"], capture_output=True, text=True).stdout.split()
        for name in ("benchmarks/collectives.py ", "torch.distributed.run")
    ]
    return sorted(map(int, set(found[0]) - set(found[1])))


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    process = start(tmp_path, "--ranks", "2,3")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    folder = tmp_path / "reports" / "collectives"
    rows = rows_of(folder / "gloo_cpu_2_ranks.csv")
    assert len(rows) >= 2 and (rows["wrong"] == 0).all()
    assert not (folder / "gloo_cpu_3_ranks.csv").exists() and "stopped" in errors
    assert workers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_one_line(tmp_path: Path, victim: int) -> None:
    process = start(tmp_path)
    os.kill(workers(tmp_path)[victim], signal.SIGKILL)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1 and errors.startswith("error: ") and errors.count("\n") == 1, errors
    assert len(rows_of(tmp_path / "reports" / "collectives" / "gloo_cpu_2_ranks.csv")) >= 2
    assert workers(tmp_path) == []
