"""What `ddp-lab parity` says to planted faults of tests/mutants that change a step: each is found, and placed.

The others change what no such step shows: what a resumed run restores, evaluation, waiting, memory, steps that are
abandoned, or rare settings.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.mutants.patches import ROOT, all_mutants
from tests.parity_tool.test_faults import RUNS

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
COMMANDS = RUNS["commands"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS["mutants"])
def test_is_found(name, tmp_path):
    mutant = next(patch for patch in all_mutants() if patch.name == name)
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "own.py").write_text(OWN)
    file = tmp_path / mutant.path
    file.write_text(mutant.applied(file.read_text()))
    line, word = RUNS["mutants"][name]
    for flags in ("PLAIN", "LANGUAGE"):
        line = line.replace(flags, COMMANDS[flags])
    command = [sys.executable, "-m", "ddp_lab", "parity", *line.split()]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr and word in answer.stdout, answer.stdout
