"""Names in traces are documented."""

import re
from pathlib import Path

import torch
import torch.distributed as dist

import ddp
from ddp_lab.analysis.traces.finding import find_windows
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.loop import PHASES
from ddp_lab.runtime.run import train_and_record
from tests.ranks import RankPool

ROOT = Path(__file__).parents[3]
TINY = {"workload": "mlp", "depth": 3, "width": 16, "train_samples": 48, "eval_samples": 4, "profile_wait": 1}


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
