"""Runs that are right raise no alarm, however they are wrapped, cut and rounded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_lab.parity import watch
from ddp_lab.parity.answer import Answer
from ddp_lab.parity.comparison import compare
from ddp_lab.parity.store import OUTPUT, read
from tests.parity_tool import parts
from tests.parity_tool.loops import train
from tests.parity_tool.test_faults import run_both
from tests.ranks import RankPool

PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "ddp": ({"wrapper": "ddp"}, {}, 2),
    "ddp on 3": ({"wrapper": "ddp"}, {}, 3),
    "ddp sgd": ({"wrapper": "ddp", "micro_batches": 2}, {"optimizer": "sgd"}, 2),
    "ddp padded": ({"wrapper": "ddp", "micro_batches": 4}, {"padded": True}, 2),
    "ddp clips": ({"wrapper": "ddp", "micro_batches": 2}, {"clips": 0.1}, 2),
    "ddp bf16": ({"wrapper": "ddp", "micro_batches": 2}, {"autocast": True}, 2),
    "ddp recomputes": ({"wrapper": "ddp", "checkpoint": True}, {}, 2),
    "fsdp": ({"wrapper": "fsdp"}, {}, 2),
    "fsdp on 4": ({"wrapper": "fsdp", "micro_batches": 2}, {}, 4),
    "fsdp clips": ({"wrapper": "fsdp"}, {"clips": 0.1}, 2),
    "fsdp bf16": ({"wrapper": "fsdp"}, {"autocast": True}, 2),
    "fsdp recomputes": ({"wrapper": "fsdp", "checkpoint": True, "micro_batches": 2}, {"padded": True}, 2),
    "zero": ({"wrapper": "ddp"}, {"optimizer": "zero"}, 2),
    "zero by hand": ({"wrapper": "ddp", "optimizer": "adam by hand"}, {}, 2),
    "cut by hand": ({}, {"cut": "tp"}, 2),
    "tokens cut by hand": ({"micro_batches": 2}, {"cut": "tokens"}, 2),
    "average": ({"micro_batches": 2}, {"cut": ""}, 2),
    **{of: ({}, {"of": of}, 2) for of in parts.PARTS},
    "by hand": ({"wrapper": "none", "micro_batches": 2}, {"clips": 0.1}, 2),
    "accumulation": ({"wrapper": "none", "micro_batches": 8}, {"padded": True, "optimizer": "sgd"}, 1),
}
"""How run B is made, how both are, and ranks."""


@pytest.mark.parametrize("name", PAIRS)
def test_agree(name: str, ranks: RankPool, tmp_path: Path) -> None:
    of_b, both, size = PAIRS[name]
    ranks.run(1, run_both, tmp_path, both)
    ranks.run(size, train_as, tmp_path / "b", of_b | both)
    runs = [read(tmp_path / run) for run in "abc"]
    for yardstick in (runs[2], None):
        answer = Answer.of(compare(runs[0], runs[1], yardstick), yardstick is not None, [])
        assert not answer.differs, answer.lines


def train_as(folder: Path, how: dict[str, Any]) -> None:
    train(folder, **how)


def padded_run(folder: Path, micro_batches: int) -> None:
    """Samples of other lengths. A micro-batch is as long as its longest."""
    torch.manual_seed(0)
    model = Padded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = watch(model, folder, steps=1)
    lengths = torch.tensor([2, 3, 5, 8])
    words = torch.randint(1, 9, (4, 8), generator=torch.Generator().manual_seed(1))
    for some, long in zip(words.chunk(micro_batches), lengths.chunk(micro_batches), strict=True):
        mask = (torch.arange(int(long.max())) < long[:, None]).long()
        (model(some[:, : mask.shape[1]], attention_mask=mask) / lengths.sum()).backward()
    optimizer.step()
    recorder.close()


class Padded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 3)

    def forward(self, words: Tensor, attention_mask: Tensor) -> Tensor:
        return (self.head(self.embed(words)).square().sum(-1) * attention_mask).sum()


def test_filling_does_not_count(tmp_path: Path) -> None:
    padded_run(tmp_path / "a", 1)
    padded_run(tmp_path / "b", 2)
    made = compare(*(read(tmp_path / run) for run in "ab"))
    assert [one for one in made.quantities if one.kind == OUTPUT]
    assert {one.way for one in made.quantities} == {"equal"}
    assert made.first is None
