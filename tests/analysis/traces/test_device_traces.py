"""Exposure in real device traces, against a plain reading of their JSON.

Those in `tests/data/traces/h200` are runs of this project on one NVIDIA H200 (2026-11-26, torch 2.11, NCCL 2.28), with
one rank over NCCL, which then needs no kernel for a collective, and with two ranks over Gloo. More are tried by

    DEVICE_TRACES=FOLDER pytest tests/analysis/traces/test_device_traces.py

where each folder below FOLDER has the traces of one window, a file a rank.
"""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.finding import group_by_window
from tests import raw

H200 = Path(__file__).parents[2] / "data" / "traces" / "h200"
FOLDERS = (H200, Path(os.environ.get("DEVICE_TRACES", "/nowhere")))
REAL = sorted(path for folder in FOLDERS for path in folder.glob("*") if path.is_dir())


def read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, strict=False)
    return found


@pytest.mark.parametrize("folder", REAL, ids=lambda folder: folder.name)
def test_times(folder: Path) -> None:
    """Of each step of each rank: compute, exposed and hidden communication, copies, idle."""
    (window,) = group_by_window(sorted(path for path in folder.iterdir() if ".json" in path.name), "x")
    analysis = analyse_window(window)
    steps = analysis.exposure.steps
    for timeline in analysis.timelines:
        trace = read(timeline.path)
        spans, windows = raw.lanes(trace, everything=True), raw.windows(trace)
        rows = steps[steps["rank"] == timeline.rank].to_dict("records")
        for row, (begin, end) in zip(rows, windows, strict=True):
            parts = raw.parts(spans, begin, end)
            ours = [row[name] for name in ("compute_ms", "exposed_ms", "exposed_copy_ms", "idle_ms", "step_ms")]
            hand = [parts[name] / 1000 for name in ("compute", "communication", "copy", "idle")] + [
                (end - begin) / 1000
            ]
            assert ours == pytest.approx(hand, rel=0.01, abs=1e-3)
