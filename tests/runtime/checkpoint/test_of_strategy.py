"""Checkpoints of strategies in loops that are not the runner's."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ddp_lab
from ddp_lab.strategy.strategy import Strategy
from tests.models import build, make_batch
from tests.ranks import RankPool
from tests.tables import each_row

STEPS = 2


def make(choice: str, seed: int) -> Strategy:
    options = ddp_lab.StrategyOptions(bucket_cap_mb=25.0)
    return ddp_lab.load(choice)(build("llama", seed), lambda p: torch.optim.AdamW(p, lr=1e-2), options)


def train(strategy: Strategy, first: int):
    """Steps of 6 samples, for any number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(first, first + STEPS):
        batch = {name: tensor[rank::size] for name, tensor in make_batch("llama", 6, step).items()}
        with strategy.micro_batch():
            strategy(**batch).loss.backward()
        strategy.step()
        strategy.zero_grad()


def save_after_some_steps(choice: str, folder: Path) -> dict[str, Tensor]:
    """What the model is when training goes on without a stop."""
    strategy = make(choice, 0)
    train(strategy, 0)
    for group in strategy.optimizer.param_groups:
        group["lr"] = 3e-3
    ddp_lab.save_checkpoint(strategy, folder)
    train(strategy, STEPS)
    return strategy.full_state_dict()


def go_on(choice: str, folder: Path) -> dict[str, Tensor]:
    strategy = make(choice, 1)
    ddp_lab.load_checkpoint(strategy, folder)
    train(strategy, STEPS)
    return strategy.full_state_dict()


@each_row("saves, loads", [("zero3", "bucket_ddp_async"), ("pytorch_zero3", "zero1")])
def test_any_choice_goes_on_on_any_number_of_ranks(ranks: RankPool, tmp_path, saves, loads):
    for _ in range(2):  # the second time it replaces the first
        straight = ranks.run(2, save_after_some_steps, saves, tmp_path / "saved")[0]
    state = ranks.run(3, go_on, loads, tmp_path / "saved")[0]
    for name, tensor in straight.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
