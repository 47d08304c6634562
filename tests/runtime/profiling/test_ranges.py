"""NVTX ranges have the names of traces and pages, and nsys and snapshots get exactly the profile windows."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ddp
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.collectives import KINDS
from ddp_lab.analysis.traces.finding import find_windows
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.loop import PHASES
from ddp_lab.runtime.process.under_nsys import SESSION, STARTED_HERE, nsys_arguments
from ddp_lab.runtime.profiling.profiler import WindowProfiler
from ddp_lab.runtime.run import train_and_record
from ddp_lab.runtime.watch import ranges
from ddp_lab.runtime.watch.flight_recorder import FlightRecorder
from ddp_lab.runtime.watch.sequence import recorded_collectives
from tests.ranks import RankPool

ROOT = Path(__file__).parents[3]
TINY = {"workload": "mlp", "depth": 3, "width": 16, "train_samples": 48, "eval_samples": 4, "profile_wait": 1}
CPU = Ranks(0, 1, torch.device("cpu"), "gloo")


class Marks:
    """Keeps each range with those around it, on threads of one rank that do not run at once."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.open = 0

    def range_push(self, name: str, /) -> None:
        self.seen.append(name)
        self.open += 1

    def range_pop(self) -> None:
        self.open -= 1


def names_of_run(folder: str, choice: str) -> tuple[list[str], int]:
    """The ranges of a whole profiled run of this rank, and how many were not closed."""
    ranks, marks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo"), Marks()
    config = RunConfig(**TINY, choice=choice, output_dir=folder, bucket_cap_mb=0.001)  # type: ignore[arg-type]
    with recorded_collectives(FlightRecorder.create(ranks.rank)):
        ranges.show_ranges(marks)
        try:
            train_and_record(config, ranks, ddp.load)
        finally:
            ranges.show_ranges(None)
    return marks.seen, marks.open


@pytest.mark.parametrize("choice", ["bucket_ddp_async", "simple_ddp_hook", "pytorch_ddp"])
def test_ranges_have_the_names_of_traces_and_pages(ranks: RankPool, tmp_path: Path, choice: str) -> None:
    (names, left), _ = ranks.run(2, names_of_run, str(tmp_path), choice)
    assert left == 0, "each range is closed"
    (window,) = find_windows(tmp_path / "profile" / choice)
    analysis = analyse_window(window)
    calls = analysis.exposure.collectives
    mine = calls[(calls["rank"] == 0) & (calls["step"] == calls["step"].max())]
    on_page = [
        f"{place} {KINDS[kind]}, {size / 2**20:.3g} MiB"
        for place, kind, size in mine[["sequence", "kind", "bytes"]].itertuples(index=False)
    ]
    assert len(on_page) > 3, "several buckets"
    in_ranges = [name for name in names if name not in PHASES]
    assert any(in_ranges[at : at + len(on_page)] == on_page for at in range(len(in_ranges))), (on_page, in_ranges)
    in_trace = read_trace(window.files[0]).events["name"]
    assert set(PHASES) <= set(names) and set(PHASES) <= set(in_trace)


def made_without_the_flag() -> tuple[bool, bool, int]:
    """Whether a recorded collective is named, whether it makes a range, and how many are recorded."""
    flight = FlightRecorder.create(dist.get_rank())
    with patch("ddp_lab.runtime.watch.ranges.call_name") as named, patch("torch.cuda.nvtx.range_push") as pushed:
        with recorded_collectives(flight):
            dist.all_reduce(torch.zeros(1))
        ranges.push("forward")
        ranges.pop()
    return named.called, pushed.called, len(flight.state().entries)


def test_without_the_flag_no_range_is_made(ranks: RankPool) -> None:
    assert ranks.run(2, made_without_the_flag) == 2 * [(False, False, 1)]


def test_documented_names(ranks: RankPool, tmp_path: Path) -> None:
    """docs/profiling.md has a row for every name of a trace that is not torch's, and for every kind of torch's."""
    ranks.run(2, names_of_run, str(tmp_path), "pytorch_ddp")
    (window,) = find_windows(tmp_path / "profile" / "pytorch_ddp")
    events = read_trace(window.files[0]).events
    found = set(events.loc[events["cat"] == "user_annotation", "name"])
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "profiling.md").read_text(), re.MULTILINE)
    patterns = [re.compile(re.escape(row).replace("NAME", r"\S+").replace("<n>", r"\d+") + "$") for row in rows]
    assert {name for name in found if not any(pattern.match(name) for pattern in patterns)} == set()
    assert set(PHASES) <= set(rows)


# Windows -------------------------------------------------------------------------------------------------------------


def run_windows(tmp_path: Path, steps: int = 9, **settings: Any) -> None:
    config = RunConfig(choice="x", profile_wait=1, profile_warmup=1, profile_active=2, profile_repeat=2, **settings)
    with WindowProfiler(config, tmp_path, "run", CPU, lambda: None) as profiler:
        for _ in range(steps):
            profiler.step()


def test_nsys_captures_the_steps_of_each_window(tmp_path: Path) -> None:
    log: list[str] = []
    with (
        patch("torch.cuda.synchronize"),
        patch("torch.cuda.profiler.start", lambda: log.append("start")),
        patch("torch.cuda.profiler.stop", lambda: log.append("stop")),
        patch("torch.cuda.nvtx.range_push", log.append),
        patch("torch.cuda.nvtx.range_pop"),
    ):
        run_windows(tmp_path, nsys=True)
    window = ["start", "ProfilerStep#{}", "ProfilerStep#{}", "stop"]
    assert log == [each.format(number) for each, number in zip(2 * window, [0, 2, 3, 0, 0, 6, 7, 0], strict=True)]
    assert not list(tmp_path.iterdir()), "torch.profiler does not run beside nsys"
    assert not ranges.are_shown()


@pytest.mark.parametrize(("steps", "captured"), [(2, 1), (3, 1), (4, 1), (7, 2)])
def test_a_capture_ends_with_a_run_that_ends_in_a_window(tmp_path: Path, steps: int, captured: int) -> None:
    log: list[str] = []
    with (
        patch("torch.cuda.synchronize"),
        patch("torch.cuda.profiler.start", lambda: log.append("start")),
        patch("torch.cuda.profiler.stop", lambda: log.append("stop")),
        patch("torch.cuda.nvtx.range_push", lambda name: log.append("push")),
        patch("torch.cuda.nvtx.range_pop", lambda: log.append("pop")),
    ):
        run_windows(tmp_path, steps, nsys=True)
    assert [each for each in log if each.startswith("st")] == captured * ["start", "stop"]
    assert log[-2:] == ["pop", "stop"] and log.count("push") == log.count("pop")


def test_a_snapshot_at_the_end_of_each_window_and_when_memory_runs_out(tmp_path: Path) -> None:
    history, observers = [], []
    with (
        patch("torch.cuda.memory._record_memory_history", lambda enabled="all", **_: history.append(enabled)),
        patch("torch.cuda.memory._dump_snapshot", lambda path: Path(path).write_text("snapshot")),
        patch("torch._C._cuda_attach_out_of_memory_observer", observers.append),
    ):
        run_windows(tmp_path, memory_snapshot=True)
        snapshots = sorted(path.name for path in tmp_path.glob("*.pickle"))
        assert snapshots == ["run.step4.memory.pickle", "run.step8.memory.pickle"]
        assert history[0] == "all" and set(history[1:]) == {None}
        (observer,) = observers
        observer(0, 1, 2, 3)
        observer(0, 1, 2, 3)  # torch may call it twice
    assert (tmp_path / "run.out-of-memory.pickle").read_text() == "snapshot"
    assert len(list(tmp_path.glob("*.trace.json.gz"))) == 2, "and traces as always"


def test_steps_before_the_last_snapshot_are_not_timed(tmp_path: Path) -> None:
    config = RunConfig(choice="x", profile_wait=2, profile_warmup=1, profile_active=1, memory_snapshot=True)
    profiler = WindowProfiler(config, tmp_path, "run", CPU, lambda: None)
    slow = []
    for profiler._step in range(6):
        slow.append(profiler.slows_this_step)
    assert slow == [True] * 4 + [False] * 2


# nsys as a prefix ----------------------------------------------------------------------------------------------------

FAKE = """#!{python}
import os, sys
with open("{log}.rank" + os.environ["RANK"], "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
program = next(index for index, each in enumerate(sys.argv) if each == sys.executable)
os.execv(sys.executable, sys.argv[program:])
"""


@pytest.fixture
def nsys_log(tmp_path: Path) -> Path:
    """Where a program `nsys` in `tmp_path / "bin"` keeps its arguments, a file a rank, before it runs the rest."""
    program, log = tmp_path / "bin" / "nsys", tmp_path / "nsys"
    program.parent.mkdir()
    program.write_text(FAKE.format(python=sys.executable, log=log))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return log


def torchrun(tmp_path: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = ["main_ddp.py", "--ddp-choice", "flat_ddp", "--workload", "mlp", "--output-dir", str(tmp_path), *flags]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *script]
    inherited = {name: value for name, value in os.environ.items() if name not in (SESSION, STARTED_HERE)}
    environment = inherited | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def test_the_chosen_rank_runs_under_nsys(tmp_path: Path, nsys_log: Path) -> None:
    """And without a GPU it then says that there is none to look at."""
    path = f"{nsys_log.parent / 'bin'}:{os.environ['PATH']}"
    done = torchrun(tmp_path, "--nsys", "--profile-ranks", "1", "--device", "cpu", "--profile-repeat", "2", PATH=path)
    assert "error: flat_ddp: --nsys: shows what a GPU does, and this run has none" in done.stderr
    assert [found.name for found in tmp_path.glob("nsys.rank*")] == ["nsys.rank1"], "not rank 0"
    (arguments,) = (tmp_path / "nsys.rank1").read_text().splitlines()
    report = rf"--output={re.escape(str(tmp_path))}/profile/flat_ddp/rank_1/\d{{8}}-\d{{6}} "
    assert re.match(rf"profile {report}.*--capture-range=cudaProfilerApi --capture-range-end=repeat:2 ", arguments)
    assert arguments.endswith("--nsys --profile-ranks 1 --device cpu --profile-repeat 2")


def test_without_nsys_one_line_says_so(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--nsys", PATH="/nowhere")
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (
        done.returncode and len(lines) == 1 and lines[0].startswith("error: --nsys: there is no nsys on PATH; install")
    )


def test_one_window_does_not_end_the_process() -> None:
    assert "--capture-range-end=stop" in nsys_arguments(Path("x"), windows=1)
