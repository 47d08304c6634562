"""What `ddp-lab parity` says to planted faults of tests/mutants that change a step: each is found, and placed.

The others change what no such step shows: what a resumed run restores, evaluation, waiting, memory, steps that are
abandoned, or rare settings.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.patches import ROOT, all_mutants
from tests.parity_tool.test_command import LANGUAGE, PLAIN

ROOMS = (
    "ddp",
    "ddp_lab",
    "sharding",
    "reference",
    "benchmarks",
    *(f"{k}_parallel" for k in ("tensor", "pipeline", "context", "expert")),
)
OWN = """
from types import SimpleNamespace
import torch
from torch import nn
from ddp_lab import Workload

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.rare = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.rand(8))

    def forward(self, x, y):
        hidden = self.used(x - self.mean)
        some = (x[:, :1] > 1.2).float()
        if some.any():  # not on every rank
            hidden = hidden + some * self.rare(x)
        return SimpleNamespace(loss=nn.functional.mse_loss(hidden, y))

def build():
    torch.rand(1)
    samples = [{"x": torch.randn(8), "y": torch.randn(8)} for _ in range(30)]
    return Workload(Net(), samples, samples)
"""
TP = ["--mesh", "tp=2", *LANGUAGE]
SEQUENCE = ["--mesh", "tp=2", "--sequence-parallel", *LANGUAGE]
CLIPS = ["--clip-grad-norm", "0.1"]
FOUND: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "01-simple-sums-each-micro-batch": (
        ["--choice", "simple_ddp", "--grad-accum-steps", "4", "--global-batch-size", "8", *PLAIN],
        ("the gradient of",),
    ),
    "04-flat-drops-unused": (["--choice", "flat_ddp", "--workload", "OWN"], ("has no gradient of rare",)),
    "09-pieces-skip-first-element": (["--choice", "zero2", *PLAIN], ("the update of",)),
    "14-norm-counts-replicas": (
        ["--choice", "zero2", "--mesh", "replicate=2,shard=2", "--ranks", "4", *CLIPS, *PLAIN],
        ("the norm by which run B clips",),
    ),
    "23-sp-norms-not-summed": (["--choice", "tp", *SEQUENCE], ("norms and biases",)),
    "25-tied-weight-untied": (["--choice", "tp", *TP], ("one parameter in run A",)),
    "27-average-without-scale": (
        ["--choice", "simple_ddp", "--grad-accum-steps", "4", "--global-batch-size", "8", *PLAIN],
        ("1 / ranks",),
    ),
    "29-clip-scales-up": (["--choice", "zero2", "--clip-grad-norm", "100", *PLAIN], ("both runs find a norm",)),
    "32-norm-counts-what-all-hold": (["--choice", "zero1", *CLIPS, *TP], ("the norm by which run B clips",)),
    "34-wrong-data-rank": (
        ["--choice", "zero1", "--mesh", "dp=2,tp=2", "--ranks", "4", *LANGUAGE],
        ("one group of tp",),
    ),
}
"""The command line, and words of the answer."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FOUND)
def test_is_found(name: str, tmp_path: Path) -> None:
    mutant = next(one for one in all_mutants() if one.name == name)
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "own.py").write_text(OWN)
    file = tmp_path / mutant.path
    file.write_text(mutant.applied(file.read_text()))
    flags, words = FOUND[name]
    flags = [flag.replace("OWN", "own.py:build") for flag in flags]
    command = [sys.executable, "-m", "ddp_lab", "parity", *flags]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    print(answer.stdout)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr
    for word in words:
        assert word in answer.stdout, answer.stdout
