"""Checkpoints of strategies in loops that are not the runner's."""

import errno
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ddp_lab
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.interface import Strategy
from tests.models import build, make_batch
from tests.ranks import RankPool
from tests.tables import each_row

STEPS = 2


def make(choice: str, seed: int) -> Strategy:
    options = ddp_lab.StrategyOptions(bucket_cap_mb=25.0)
    return ddp_lab.load(choice)(build("llama", seed), lambda p: torch.optim.AdamW(p, lr=1e-2), options)


def train(strategy: Strategy, first: int) -> None:
    """Steps of 6 samples, for any number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(first, first + STEPS):
        mine = {name: tensor[rank::size] for name, tensor in make_batch("llama", 6, step).items()}
        with strategy.micro_batch():
            strategy(**mine).loss.backward()
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
def test_any_choice_goes_on_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path, saves: str, loads: str) -> None:
    for _ in range(2):  # the second time it replaces the first
        wanted = ranks.run(2, save_after_some_steps, saves, tmp_path / "saved")[0]
    state = ranks.run(3, go_on, loads, tmp_path / "saved")[0]
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def load_nothing(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        ddp_lab.load_checkpoint(make("zero2", 0), folder)
    return str(caught.value)


def test_an_empty_folder_is_said(ranks: RankPool, tmp_path: Path) -> None:
    assert "no checkpoint of a strategy" in ranks.run(2, load_nothing, tmp_path)[0]


def save_on_a_full_disk(folder: Path, full: int) -> str:
    """A first save goes well; the second fails on one rank."""
    strategy = make("zero2", 0)
    ddp_lab.save_checkpoint(strategy, folder)
    train(strategy, 0)
    error = OSError(errno.ENOSPC, "No space left on device") if dist.get_rank() == full else None
    with (
        mock.patch("ddp_lab.runtime.checkpoint.of_strategy.write_tensors", side_effect=error),
        pytest.raises(Exception) as caught,
    ):
        ddp_lab.save_checkpoint(strategy, folder)
    ddp_lab.load_checkpoint(make("zero1", 1), folder)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_disk_that_is_full_on_one_rank_ends_the_save_on_all_and_leaves_what_was_there(
    ranks: RankPool, tmp_path: Path
) -> None:
    other, full = ranks.run(2, save_on_a_full_disk, tmp_path / "saved", 1)
    assert full == "OSError: [Errno 28] No space left on device"
    assert other == "UserError: rank 1: [Errno 28] No space left on device"
