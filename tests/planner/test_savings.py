"""`ddp-lab plan savings`: what other settings of a run would save of its memory."""

import json
from pathlib import Path

import pandas as pd
import pytest

from ddp_lab.planner import command as script
from ddp_lab.planner.savings import RECORDED, TOGETHER, Recorded, read_recorded
from ddp_lab.planner.simulation.memory import CUDA_BLOCK
from tests.in_process import run_in_process
from tests.traces import record_of_eight_steps

RUN_ID = "20261121-093000-0001"
MEASURED = 123_456


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Of zero1 on an mlp of 2 x 16 x 16 parameters on two ranks, whose two layers are blocks."""
    folder = tmp_path / "profile" / "zero1"
    folder.mkdir(parents=True)
    content = record_of_eight_steps("zero1", 1e-3) | {"run_id": RUN_ID, "device": "cpu"}
    content["config"] = content["config"] | {"depth": 4, "width": 16, "grad_accum_steps": 1}
    content["memory"] = [{"rank": 1, "peak_bytes": 1}, {"rank": 0, "peak_bytes": MEASURED}]
    (folder / f"{RUN_ID}.run.json").write_text(json.dumps(content))
    return folder


def test_each_setting_beside_the_recorded_one(run_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out" / "savings.csv"
    answer = run_in_process(script, "savings", str(run_folder), "--jobs", "1", "--csv", str(file))
    assert (answer.returncode, answer.stderr) == (0, "")
    table = pd.read_csv(file).set_index("setting")
    first = table.iloc[0]
    assert table.index[0] == RECORDED and first["measured_bytes"] == MEASURED and first["saved_bytes"] == 0
    assert "zero1" not in table.index, "it is what was recorded"
    parts = [name for name in table.columns if name.startswith("peak_") and name != "peak_bytes"]
    known = table[table["note"].isna()]
    assert (known[parts].sum(axis="columns") == known["peak_bytes"]).all()
    assert (known["saved_bytes"] == first["peak_bytes"] - known["peak_bytes"]).all()
    assert "this strategy can take optimizer off" in table.loc["--offload parameters", "note"]
    states = 2 * 4 * 16 * 16 * 4 // 2  # of four layers, Adam's two values of each parameter, half of them on a rank
    assert known.loc["--offload optimizer", "saved_bytes"] == pytest.approx(states, rel=0.05)
    assert known["saved_bytes"].idxmax() == ", ".join(TOGETHER)
    assert "most memory of rank 0 in a step" in answer.stdout and "--offload parameters: " in answer.stdout


def test_of_a_run_on_gpus(run_folder: Path) -> None:
    """Allocations are rounded as CUDA's allocator does, and the batch counts."""
    path = next(run_folder.glob("*.run.json"))
    recorded = [Recorded(read_recorded(path)[1], 2, *on) for on in (("cpu", "gloo"), ("cuda", "nccl"))]
    on_cpu, on_gpu = (one.row(RECORDED, {}) for one in recorded)
    assert on_gpu["peak_bytes"] > on_cpu["peak_bytes"] and on_gpu["peak_bytes"] % CUDA_BLOCK == 0
    offloaded = recorded[1].row("", {"offload": "optimizer"})
    assert offloaded["peak_optimizer_state_bytes"] == 0 < on_gpu["peak_optimizer_state_bytes"]
