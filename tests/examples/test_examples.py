"""The example scripts run as docs/own-loop.md says, from a folder that is not the project's."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run_example(name: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", EXAMPLES / name]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode()


def test_a_plain_loop_learns_and_saves(tmp_path: Path) -> None:
    said = run_example("plain_loop.py", tmp_path, "zero3")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < 0.8 * losses[0]
    assert torch.load(tmp_path / "model.pt")["0.weight"].shape == (64, 16)


@pytest.mark.slow
def test_the_turned_over_script_learns_and_saves(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    said = run_example("fine_tune.py", tmp_path, "--choice", "zero3", "--output-dir", "tuned")
    last = float(re.findall(r"accuracy ([\d.]+)%", said)[-1])
    assert last > 90
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned").eval()
    rows = torch.randint(8, 100, (40, 16))  # without a 7
    rows[20:, 5] = 7
    right = model(input_ids=rows).logits.argmax(-1) == torch.arange(40).ge(20)
    assert right.float().mean() > 0.8


@pytest.mark.slow
def test_two_models_with_two_strategies(tmp_path: Path) -> None:
    said = run_example("gan.py", tmp_path, "bucket_ddp_async", "zero3")
    (radius,) = re.findall(r"radius of ([\d.]+)", said)
    assert float(radius) == pytest.approx(1, abs=0.15)


def adapters() -> Any:
    spec = importlib.util.spec_from_file_location("cs336_adapters", EXAMPLES / "cs336_adapters.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def half(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def drive_adapters() -> None:
    """As the course's tests do: their own optimizer, something of ours after backward."""
    use, rank = adapters(), dist.get_rank()
    for wrap, finish, whole in (
        (use.get_ddp, use.ddp_on_after_backward, lambda model: model.module.state_dict()),
        (use.get_fsdp, use.fsdp_on_after_backward, use.fsdp_gather_full_params),
    ):
        model, plain = wrap(network(rank)), network(0)
        optimizer, of_plain = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
        for step in range(3):
            optimizer.zero_grad()
            of_plain.zero_grad()
            model(half(step, rank)).square().mean().backward()
            finish(model, optimizer)
            assert all(p.grad is not None and p.grad.shape == p.shape for p in model.module.parameters())
            optimizer.step()
            plain(torch.cat([half(step, 0), half(step, 1)])).square().mean().backward()
            of_plain.step()
        state = whole(model)
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-7)
    sharded, plain = network(0), network(0)
    optimizer = use.get_sharded_optimizer(sharded.parameters(), torch.optim.AdamW, lr=0.1)
    of_plain = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        for one, its in ((sharded, optimizer), (plain, of_plain)):
            its.zero_grad()
            one(half(step, 0)).square().mean().backward()
            its.step()
    for own, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_adapters_for_the_tests_of_cs336(ranks: RankPool) -> None:
    ranks.run(2, drive_adapters)
    code = (EXAMPLES / "cs336_adapters.py").read_text().partition("import ddp_lab\n")[2]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40
