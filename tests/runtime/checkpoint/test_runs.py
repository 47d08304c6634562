"""Whole runs that resume: the record, the end of a run, profiles, and ranks that are killed under `torchrun`."""

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddp_lab.runtime.checkpoint.manifest import MANIFEST
from ddp_lab.strategy.model_parallel import Cut
from tests.faults.scenarios import SCRIPT
from tests.ranks import RankPool
from tests.runtime.checkpoint.test_files import manifest
from tests.runtime.test_run import run_here
from tests.scripts.test_command_line import ROOT, TIMEOUT_S, TORCHRUN

TINY = {"workload": "mlp", "depth": 3, "width": 16, "train_samples": 40, "eval_samples": 13, "choice": "flat_ddp"}


def records(folder: Path, choice: str) -> list[dict[str, Any]]:
    """Of all completed runs of a choice, in the order in which they ended."""
    paths = sorted((folder / "profile" / choice).glob("*.run.json"), key=lambda path: path.stat().st_mtime_ns)
    return [record for path in paths if (record := json.loads(path.read_text()))["ended"]["how"] == "completed"]


def test_the_record_holds_all_steps(ranks: RankPool, tmp_path):
    """A run that stopped after step 3 of 6, where the first epoch ends, and once more after the last step."""
    steps = {**TINY, "train_samples": 20, "epochs": 2, "profile_wait": 0, "profile_warmup": 1, "profile_active": 1}
    straight = {**steps, "output_dir": str(tmp_path / "straight"), "no_profile": True}
    assert ranks.run(2, run_here, straight) == [None, None]
    (expected,) = records(tmp_path / "straight", "flat_ddp")
    assert expected["resumed_from"] is None and len(expected["train_loss"]) == 6
    saving = {**steps, "output_dir": str(tmp_path / "stopped"), "checkpoint_every": 2}
    assert ranks.run(2, run_here, {**saving, "max_steps": 3, "no_profile": True}) == [None, None]
    for _ in range(2):
        assert ranks.run(2, run_here, {**saving, "resume": "latest"}) == [None, None]
    _, resumed, ended = records(tmp_path / "stopped", "flat_ddp")
    folder = tmp_path / "stopped" / "checkpoints" / "flat_ddp"
    for record, step in ((resumed, 3), (ended, 6)):
        for field in ("train_loss", "step_samples", "eval"):
            assert record[field] == expected[field], field
        assert record["step_time_s"][:step] == [None] * step and len(record["step_time_s"]) == 6
        assert record["resumed_from"]["path"] == str(folder / f"step_{step:08d}")
        assert record["resumed_from"]["step"] == step
    assert resumed["resumed_from"]["changed"] == {"max_steps": [3, None]} and ended["resumed_from"]["changed"] == {}
    assert resumed["config"]["no_profile"] is False and ended["config"]["no_profile"] is True
    assert sorted(path.name for path in folder.glob("step*")) == [f"step_{s:08d}" for s in (2, 3, 4, 6)]


def test_error_feedback_is_not_saved(ranks: RankPool, tmp_path):
    """And the resumed run says so."""
    settings = {**TINY, "compress": "int8", "no_profile": True, "output_dir": str(tmp_path), "checkpoint_every": 1}
    for more in ({"max_steps": 1}, {"max_steps": 2, "resume": "latest"}):
        assert ranks.run(2, run_here, settings | more) == [None, None]
    first, resumed = records(tmp_path, "flat_ddp")
    assert first["notes"] == [] and "without the error feedback of --compress int8" in resumed["notes"][0]


def test_every_field_of_the_manifest_is_documented():
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    documented = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    content = msgspec.to_builtins(manifest(1, files={"rank_0.safetensors": {"bytes": 1, "crc32": 1}}))
    fields = {*content, "crc32"}
    fields |= {f"parameters.*.{name}" for name in content["parameters"]["weight"]}
    fields |= {f"cuts.*.{field.name}" for field in dataclasses.fields(Cut)}
    fields |= {f"files.*.{name}" for name in content["files"]["rank_0.safetensors"]}
    assert set(documented) == fields and MANIFEST in text


# Killed ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(ranks: RankPool, tmp_path):
    """Of 8 steps: rank 1 is killed in step 5, torchrun restarts the ranks, and they resume after step 4."""
    flags = ["--ddp-choice", "zero2", "--workload", "mlp", "--depth", "3", "--width", "16", "--no-profile"]
    flags += ["--train-samples", "64", "--eval-samples", "4", "--output-dir", str(tmp_path), "--checkpoint-every", "2"]
    answer = subprocess.run(
        [*TORCHRUN, "--nproc_per_node=2", "--max-restarts=1", SCRIPT, *flags],
        cwd=ROOT,
        env=os.environ | {"FAULT": "kill:rank=1:step=5:at=forward"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert answer.returncode == 0 and "leaked" not in answer.stderr, answer.stderr
    assert "zero2: resumes after step 4 from" in answer.stdout
    (record,) = records(tmp_path, "zero2")
    assert len(record["train_loss"]) == 8 and record["resumed_from"]["step"] == 4
    straight = {**TINY, "choice": "bucket_ddp_async", "train_samples": 64, "eval_samples": 4, "no_profile": True}
    ranks.run(2, run_here, {**straight, "output_dir": str(tmp_path)})
    (expected,) = records(tmp_path, "bucket_ddp_async")
    assert record["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
