"""Modules that run twice, in another order, not at all, or not on all ranks."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.strategies.cases.case import FEATURES, LoopCase, Run, Samples, squared_error


class Blocks(nn.Module):
    """A layer, four equal blocks of which `chosen` run in that order, and a head."""

    def __init__(self, reentrant: bool | None = None):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor, chosen: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        hidden = self.first(x)
        for index in chosen:
            if self.reentrant is None:
                hidden = hidden + self.blocks[index](hidden)
            else:
                hidden = hidden + checkpoint(self.blocks[index], hidden, use_reentrant=self.reentrant)
        return self.last(hidden)


class Experts(nn.Module):
    """Each sample goes to one of four experts; by a router that trains, as in a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.router, self.last = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 1)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, weights[rows, None] * expert(x[rows]))
        return self.last(x + out)


def blocks_of(*by_step: tuple[int, ...]):
    def loss(run: Run, batch: Samples) -> Tensor:
        return nn.functional.mse_loss(run(batch.x, by_step[batch.step % len(by_step)]), batch.y)

    return loss


def blocks_by_rank(run: Run, batch: Samples) -> Tensor:
    chosen = ((0, 1), (0, 2, 3), (3,))[(batch.rank + batch.step) % 3]
    return nn.functional.mse_loss(run(batch.x, chosen), batch.y)


def two_forwards(run: Run, batch: Samples) -> Tensor:
    return squared_error(run, batch) + 0.5 * nn.functional.mse_loss(run(-batch.x), batch.y)


def two_forwards_other_blocks(run: Run, batch: Samples) -> Tensor:
    return nn.functional.mse_loss(run(batch.x, (0, 1)) + run(batch.x, (1, 3, 2)), batch.y)


def two_backwards(run: Run, batch: Samples) -> list[Tensor]:
    return [squared_error(run, batch), 0.5 * nn.functional.mse_loss(run(-batch.x), batch.y)]


CASES = {
    "a block runs twice": LoopCase(Blocks, blocks_of((0, 1, 0, 2, 3))),
    "blocks in another order": LoopCase(Blocks, blocks_of((2, 0, 3, 1))),
    "blocks in another order in each step": LoopCase(Blocks, blocks_of((0, 1, 2, 3), (3, 1, 0, 2), (1, 0, 2, 3))),
    "a block is passed over in each step": LoopCase(Blocks, blocks_of((0, 2, 3), (0, 1, 3), (1, 2)), unused=True),
    "a block that never runs": LoopCase(Blocks, blocks_of((0, 1, 3)), unused=True),
    "control flow by rank": LoopCase(Blocks, blocks_by_rank, unused=True),
    "experts": LoopCase(Experts, unused=True),
    "two forwards, one backward": LoopCase(Blocks, two_forwards),
    "two forwards of other blocks": LoopCase(Blocks, two_forwards_other_blocks),
    "two forwards, two backwards": LoopCase(Blocks, two_backwards),
    "checkpoints": LoopCase(lambda: Blocks(False)),
    "checkpoints, re-entrant": LoopCase(lambda: Blocks(True)),
    "a block in two checkpoints": LoopCase(lambda: Blocks(False), blocks_of((0, 1, 0, 2, 3))),
    "a block in two re-entrant checkpoints": LoopCase(lambda: Blocks(True), blocks_of((0, 1, 0, 2, 3))),
    "accumulation": LoopCase(Blocks, micro_batches=3),
    "accumulation, control flow by rank": LoopCase(Blocks, blocks_by_rank, micro_batches=2, unused=True),
}
