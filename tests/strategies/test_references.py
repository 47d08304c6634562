"""What the originals of sharding hold, and how they answer to what they cannot do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sharding
from tests.models import FEATURES, answer, batch
from tests.parity import OPTIMIZERS
from tests.ranks import RankPool
from training.config import StrategyOptions
from training.errors import OneRankError, UnsupportedError

FSDP2 = ["pytorch_zero2", "pytorch_zero3"]


class Stack(nn.Module):
    """Blocks, of which those in `skipped` do not run, and what else `extra` is."""

    def __init__(self, extra: Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, 1)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.extra = nn.Parameter(torch.ones(FEATURES) if extra is None else extra)
        self.skipped: list[int] = []

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        hidden = self.first(x * self.extra.float())
        for index, block in enumerate(self.blocks):
            if index not in self.skipped:
                hidden = torch.tanh(block(hidden))
        return answer(self.last(hidden), y)


def make(name: str, module: nn.Module) -> Any:
    return sharding.load(name)(module, OPTIMIZERS["adam"], StrategyOptions())


def resting_bytes(name: str) -> tuple[dict[str, int], dict[str, int]]:
    """After a step, and after an evaluation that follows it."""
    module = Stack()
    strategy = make(name, module)
    strategy.forward_backward([batch(2, 0)] * 2)
    strategy.step()
    after_step = strategy.memory_breakdown()
    with torch.no_grad():
        strategy.forward(batch(2, 0))
    return after_step, strategy.memory_breakdown()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_rests_at_one_part_of_everything(ranks: RankPool, name: str, world_size: int) -> None:
    """Rows are cut in N equal parts, padded: 4 bytes an element for parameters and gradients each, 8 for Adam."""
    shapes = [p.shape for p in Stack().parameters()]
    padded = sum(-(-shape[0] // world_size) * shape[1:].numel() for shape in shapes)
    for rank, (after_step, after_evaluation) in enumerate(ranks.run(world_size, resting_bytes, name)):
        assert after_step == after_evaluation
        assert after_step["parameters"] == after_step["gradients"] == 4 * padded
        rows = [
            len(range(shape[0])[rank * -(-shape[0] // world_size) :][: -(-shape[0] // world_size)]) for shape in shapes
        ]
        own = sum(count * shape[1:].numel() for count, shape in zip(rows, shapes, strict=True))
        assert after_step["optimizer_state"] == 8 * own + 4 * len(shapes)  # not padded, and a step count each
        assert after_step["buffers"] == 0


def run_other_units(name: str) -> tuple[str, str, bool]:
    """Ranks skip different blocks in the first pass; later both skip one that they ran before; and then train on."""
    module = Stack()
    strategy = make(name, module)
    module.skipped = [dist.get_rank()]
    with pytest.raises(UnsupportedError) as at_first:
        strategy.forward_backward([batch(2, 0)])
    module.skipped = []
    strategy.forward_backward([batch(2, 0)])
    strategy.step()
    module.skipped = [1]
    with pytest.raises(OneRankError) as later:
        strategy.forward_backward([batch(2, 0)])
    module.skipped = []
    loss = strategy.forward_backward([batch(2, 0)])
    strategy.step()
    return str(at_first.value), str(later.value), bool(loss.isfinite())


@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_ranks_that_run_different_blocks_do_not_hang(ranks: RankPool, name: str) -> None:
    for rank, (at_first, later, trains_on) in enumerate(ranks.run(2, run_other_units, name)):
        assert "(rank 0: blocks.1; rank 1: blocks.0)" in at_first and trains_on
        assert f"rank {rank} runs blocks.2 where it first ran blocks.1" in later


def refuse(name: str, extra: Tensor) -> str:
    with pytest.raises(UnsupportedError) as caught:
        make(name, Stack(extra))
    return str(caught.value)


@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_refuses_what_it_cannot_train(ranks: RankPool, name: str) -> None:
    cases = {
        "uniform original parameter dtype": torch.ones(FEATURES, dtype=torch.float64),
        "scalar parameters": torch.tensor(1.0),
        "extra, which has no elements": torch.ones(0, 3),
        "non-contiguous parameters": torch.ones(4, FEATURES).t(),
    }
    for wanted, extra in cases.items():
        assert all(wanted in message for message in ranks.run(2, refuse, name, extra))


def refuse_adafactor(name: str) -> str:
    with pytest.raises(UnsupportedError) as caught:
        sharding.load(name)(Stack(), torch.optim.Adafactor, StrategyOptions())
    return str(caught.value)


@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_refuses_an_optimizer_that_needs_whole_parameters(ranks: RankPool, name: str) -> None:
    """Its own answer would be an error about placements, in the first step. `pytorch_zero1` can do it."""
    assert all("does not work on each element" in message for message in ranks.run(2, refuse_adafactor, name))
