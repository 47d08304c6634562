"""Compressed gradients beyond parity: what travels."""

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import ddp
from ddp_lab.strategy.communication.bf16 import Bf16
from tests.parity import Case, trained
from tests.ranks import RankPool
from tests.tables import each_row


def rounded_by_both() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The averages of gradients by this project's bf16 all-reduce, and by PyTorch's hook."""
    averages = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for dtype in (torch.float32, torch.bfloat16):
        average = torch.randn(1000, generator=generator).to(dtype)
        torchs = average.clone()
        Bf16(dist.group.WORLD).all_reduce(average).wait()
        bf16_compress_hook(dist.group.WORLD, (torchs,)).wait()  # type: ignore[arg-type]
        averages.append((average, torchs))
    return averages


def test_the_rounded_all_reduce_is_pytorchs_bit_by_bit(ranks: RankPool):
    for of_rank in ranks.run(3, rounded_by_both):
        for average, torchs in of_rank:
            assert torch.equal(average, torchs) and average.abs().sum() > 0


def futures_asked_for(case: Case) -> int:
    """How often a training on this rank asks a collective for its future."""
    calls, original = [], dist.Work.get_future
    with mock.patch.object(dist.Work, "get_future", lambda work: [calls.append(work), original(work)][1]):
        trained(case)
        dist.all_reduce(torch.zeros(1), async_op=True).get_future().wait()  # shows that the mock sees a call
    return len(calls) - 1


@each_row("name", [name for name in ddp.CHOICES if ddp.REGISTRY.location(name).startswith("ddp.")])
def test_no_hand_written_choice_asks_for_a_future(ranks: RankPool, name):
    """With torch's `nccl`, to ask for a collective's future makes the compute stream wait for it (docs/status.md)."""
    for options in ({}, {"reduce_dtype": "bf16"}, {"compress": "int8"}):
        case = Case(name, "tied", options=options)
        assert ranks.run(2, futures_asked_for, case) == [0, 0], options
