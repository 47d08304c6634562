"""The example scripts run as docs/own-loop.md says, from a folder that is not the project's."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool
from tests.scripts.test_command_line import ROOT, TORCHRUN

EXAMPLES = ROOT / "examples"


def plain_loop(folder: Path) -> str:
    """What the script prints on this rank, which has joined a group already."""
    output = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        mock.patch.object(sys, "argv", ["plain_loop.py", "zero3"]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        runpy.run_path(str(EXAMPLES / "plain_loop.py"))
    return output.getvalue()


def test_a_plain_loop_learns_and_saves(ranks: RankPool, tmp_path):
    output, nothing = ranks.run(2, plain_loop, tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < 0.8 * losses[0] and output.startswith("zero3: 2 ranks on ") and nothing == ""
    assert torch.load(tmp_path / "model.pt")["0.weight"].shape == (64, 16)


@pytest.mark.slow
def test_the_turned_over_script_learns_and_saves(tmp_path):
    from transformers import AutoModelForSequenceClassification

    command = [*TORCHRUN, "--nproc_per_node=2", EXAMPLES / "fine_tune.py", "--choice", "zero3", "--output-dir", "tuned"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stderr[-3000:]
    last = float(re.findall(r"accuracy ([\d.]+)%", answer.stdout)[-1])
    assert last > 90
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned").eval()
    rows = torch.randint(8, 100, (40, 16))  # without a 7
    rows[20:, 5] = 7
    right = model(input_ids=rows).logits.argmax(-1) == torch.arange(40).ge(20)
    assert right.float().mean() > 0.8
