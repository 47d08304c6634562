"""What a strategy announces that it sends is what arrives, as the operating system counts it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.parity import built
from tests.ranks import RankPool
from tests.tables import each_row
from tests.traffic import received_over_tcp

LAYERS, WIDTH, MICRO_BATCHES = 4, 252, 2


class Wide(torch.nn.Module):
    """So wide that what Gloo says beside the data is little."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=x.square().mean())


def what_arrives(choice: str) -> tuple[float, float, float]:
    """Of a step: bytes that arrived here, that a rank sends as announced, and of all parameters."""
    strategy = built(choice, Wide())
    nbytes = 4.0 * LAYERS * WIDTH * (WIDTH + 1)
    for _ in range(2):
        dist.barrier()
        before = received_over_tcp()
        strategy.zero_grad()
        strategy.forward_backward([{"x": torch.ones(2, WIDTH)}] * MICRO_BATCHES)
        strategy.step()
        strategy.finish_parameter_synchronization()
        dist.barrier()
    sent = sum(part.wire_bytes for part in strategy.expected_traffic(MICRO_BATCHES))
    return received_over_tcp() - before, sent, nbytes


@each_row("world_size", [2, 3])
def test_what_is_announced_is_sent(ranks: RankPool, world_size):
    """By the formulas of docs/how-it-works, and as the operating system counts it. `zero3` gathers its last unit once a
    micro-batch. Torch's reduce-scatter over Gloo is an all-reduce."""
    formulas = {"zero1": 2, "zero2": MICRO_BATCHES + 1, "zero3": MICRO_BATCHES * (3 - 1 / LAYERS)}
    for name, formula in (formulas | {"pytorch_zero3": MICRO_BATCHES * 3}).items():
        found = ranks.run(world_size, what_arrives, name)
        arrived, sent, whole = (sum(each) / world_size for each in zip(*found, strict=True))
        share = (world_size - 1) / world_size * whole
        assert sent / share == pytest.approx(formula, rel=2e-3), name
        over_gloo = formula + MICRO_BATCHES * (name == "pytorch_zero3")
        assert arrived / share == pytest.approx(over_gloo, rel=0.01), name
