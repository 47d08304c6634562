"""`--compile` as a user runs it: with the default backend, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ddp_lab.runtime.records.progress import compiled
from tests.faults.scenarios import ROOT

NO_COMPILER = """
import torch
from ddp_lab.strategy.compilation import require_compiler
from ddp_lab.runtime.errors import UserError
try: require_compiler(torch.device("cpu"))
except UserError as error: print(error)
"""


def run(*command: str, **environment: str) -> str:
    answer = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=280
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_a_machine_without_a_compiler_is_told_in_one_line() -> None:
    said = run("-c", NO_COMPILER, PATH="")
    assert said.startswith("--compile: on a CPU it needs a C++ compiler") and said.count("\n") == 1


def test_the_summary_says_what_was_compiled() -> None:
    made = {"graphs": 2, "recompilations": {"a": 1}, "graph_breaks": {}, "seconds": 30.6}
    assert compiled(made) == "2 graphs compiled in 31 s, 1 of them again, no graph breaks"
    made = {"graphs": 1, "recompilations": {}, "graph_breaks": {"b": 1}, "seconds": 2.0}
    assert compiled(made) == "1 graph compiled in 2 s, 0 of them again, 1 graph break"


@pytest.mark.exhaustive
def test_a_run_with_its_report(tmp_path: Path) -> None:
    """Compiled and not, losses agree; the audit of the compiled run holds, and its graphs count as compute."""
    flags = ["--ddp-choice", "zero3", "--workload", "sample-lm", "--max-steps", "10", "--eval-samples", "8"]
    records: list[dict[str, Any]] = []
    for folder, more in (("compiled", ["--compile"]), ("plain", ["--no-profile"])):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "main_shard.py"]
        output = tmp_path / folder
        run(*torchrun, *flags, "--output-dir", str(output), *more, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        (path,) = output.glob("profile/zero3/*.run.json")
        records.append(json.loads(path.read_text()))
    made, other = records
    assert made["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
    assert made["compile"]["graphs"] >= 1 and made["compile"]["graph_breaks"] == {} and other["compile"] is None
    assert made["settling_steps"] == 2
    run("scripts/analyze_traces_sharding.py", "--trace-dir", str(tmp_path / "compiled" / "profile" / "zero3"))
    report = tmp_path / "compiled" / "reports_sharding" / "zero3"
    assert (pd.read_csv(report / "audit.csv").result == "pass").all()
    assert (pd.read_csv(report / "summary.csv").compute_pct > 20).all()
