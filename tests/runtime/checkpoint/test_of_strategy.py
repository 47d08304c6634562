"""Checkpoints of strategies in loops that are not the runner's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor

import ddp_lab
from ddp_lab.runtime.checkpoint.files import TensorFiles, write_tensors
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


def said_of_altered(folder: Path, altered: list[tuple[str, Any]]) -> list[str]:
    """On a rank: what loading says, after each change of one entry of the header; None takes it away."""
    train(stepped := make("bucket_ddp_async", 0), 0)
    ddp_lab.save_checkpoint(stepped, folder)
    path, said = folder / "rank_0.safetensors", []
    tensors, texts = load(path.read_bytes()), TensorFiles([path]).of_file(path.name)[1]
    name = next(iter(stepped.trainable))
    for field, value in altered:
        changed: dict[str, Any] = {**tensors, **texts}
        key = field.format(name)
        assert key in changed
        changed[key] = changed[key].view(value) if isinstance(value, torch.dtype) else value
        kept = {key: one for key, one in changed.items() if one is not None}
        whole = {key: one for key, one in kept.items() if isinstance(one, Tensor)}
        write_tensors(path, whole, {key: one for key, one in kept.items() if key not in whole})
        with pytest.raises(UserError) as error:
            ddp_lab.load_checkpoint(make("bucket_ddp_async", 1), folder)
        said.append(str(error.value))
    return said


def test_what_is_altered_is_named(ranks: RankPool, tmp_path: Path) -> None:
    rows = [
        ("parameter/{}/0", torch.int32, "values are of torch.int32, and torch.float32 is expected"),
        ("parameter/{}/0", None, "not stored"),
        ("optimizer_count/step/{}/0", None, "its single optimizer states are"),
        ("parameter_groups", '[{"lr": "x"}]', "rank_0.safetensors: parameter_groups: Expected"),
        ("parameter_groups", '[{"lr": [1, 2]}]', "other parameter groups"),
        ("optimizer_steps", "many", "rank_0.safetensors: optimizer_steps: JSON is malformed"),
        ("cuts", None, "rank_0.safetensors: cuts: Input data was truncated"),
    ]
    (said,) = ranks.run(1, said_of_altered, tmp_path / "saved", [row[:2] for row in rows])
    for (*_, expected), line in zip(rows, said, strict=True):
        assert expected in line and "\n" not in line
