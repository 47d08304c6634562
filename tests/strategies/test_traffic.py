"""What formulas say that a strategy sends is what arrives, as the operating system counts it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.parity import built
from tests.ranks import RankPool
from tests.tables import each_row
from tests.traffic import received_over_tcp

LAYERS, WIDTH, MICRO_BATCHES = 4, 252, 2


class WideLayers(torch.nn.Module):
    """So wide that Gloo's own messages are few beside the data."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=x.square().mean())


def what_arrives(choice: str) -> int:
    """Bytes of a step."""
    strategy = built(choice, WideLayers())
    for _ in range(2):
        dist.barrier()
        before = received_over_tcp()
        strategy.zero_grad()
        strategy.forward_backward([{"x": torch.ones(2, WIDTH)}] * MICRO_BATCHES)
        strategy.step()
        strategy.finish_parameter_synchronization()
        dist.barrier()
    return received_over_tcp() - before


@each_row("world_size", [2, 3])
def test_what_arrives_is_as_the_formulas_say(ranks: RankPool, world_size):
    """Those of docs/how-it-works; `test_parity` compares what is announced with what is issued. `zero3` gathers its
    last unit once a micro-batch. Torch's reduce-scatter over Gloo is an all-reduce."""
    formulas = {"zero1": 2, "zero2": MICRO_BATCHES + 1, "zero3": MICRO_BATCHES * (3 - 1 / LAYERS)}
    share = (world_size - 1) / world_size * 4 * LAYERS * WIDTH * (WIDTH + 1)
    for name, formula in (formulas | {"pytorch_zero1": 3, "pytorch_zero3": MICRO_BATCHES * (3 + 1)}).items():
        arrived = sum(ranks.run(world_size, what_arrives, name)) / world_size
        assert arrived / share == pytest.approx(formula, rel=0.01), name
