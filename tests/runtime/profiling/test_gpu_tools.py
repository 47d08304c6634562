"""Names in traces are documented, and nsys and snapshots get exactly the profile windows."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

import ddp
from ddp_lab.analysis.traces.finding import find_windows
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.loop import PHASES
from ddp_lab.runtime.profiling.profiler import WindowProfiler
from ddp_lab.runtime.run import train_and_record
from tests.ranks import RankPool

ROOT = Path(__file__).parents[3]
TINY = {"workload": "mlp", "depth": 3, "width": 16, "train_samples": 48, "eval_samples": 4, "profile_wait": 1}
CPU = Ranks(0, 1, torch.device("cpu"), "gloo")


def profiled_run(folder: str) -> None:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    config = RunConfig(**TINY, choice="pytorch_ddp", output_dir=folder)  # type: ignore[arg-type]
    train_and_record(config, ranks, ddp.load)


def test_documented_names(ranks: RankPool, tmp_path: Path) -> None:
    """docs/profiling.md has a row for every name of a trace that is not torch's, and for every kind of torch's."""
    ranks.run(2, profiled_run, str(tmp_path))
    (window,) = find_windows(tmp_path / "profile" / "pytorch_ddp")
    events = read_trace(window.files[0]).events
    found = set(events.loc[events["cat"] == "user_annotation", "name"])
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "profiling.md").read_text(), re.MULTILINE)
    patterns = [re.compile(re.escape(row).replace("NAME", r"\S+").replace("<n>", r"\d+") + "$") for row in rows]
    assert {name for name in found if not any(pattern.match(name) for pattern in patterns)} == set()
    assert set(PHASES) <= set(rows)


def run_windows(tmp_path: Path, steps: int = 9, **settings: Any) -> None:
    config = RunConfig(choice="x", profile_wait=1, profile_warmup=1, profile_active=2, profile_repeat=2, **settings)
    with WindowProfiler(config, tmp_path, "run", CPU, lambda: None) as profiler:
        for _ in range(steps):
            profiler.step()


@pytest.mark.parametrize(("steps", "captured"), [(9, [[2, 3], [6, 7]]), (2, [[2]]), (3, [[2, 3]]), (6, [[2, 3], [6]])])
def test_nsys_captures_the_steps_of_each_window(tmp_path: Path, steps: int, captured: list[list[int]]) -> None:
    """A capture ends with a run that ends within its window, too."""
    log: list[str] = []
    emit = MagicMock()
    emit.return_value.__enter__.return_value = emit.return_value
    with (
        patch("torch.cuda.synchronize"),
        patch("torch.cuda.profiler.start", lambda: log.append("start")),
        patch("torch.cuda.profiler.stop", lambda: log.append("stop")),
        patch("torch.cuda.nvtx.range_push", log.append),
        patch("torch.cuda.nvtx.range_pop"),
        patch("torch.autograd.profiler.emit_nvtx", emit),
    ):
        run_windows(tmp_path, steps, nsys=True)
    windows = " ".join(log).split("start")[1:]
    assert [[int(step) for step in re.findall(r"#(\d+)", window)] for window in windows] == captured
    assert all(window.rstrip().endswith("stop") for window in windows)
    assert emit.return_value.__exit__.call_count == len(captured)
    assert not list(tmp_path.iterdir()), "torch.profiler does not run beside nsys"


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
