"""`--compress int8`: what a message loses, that it arrives later, and that all ranks have the same bits."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_lab.runtime.errors import NonFiniteError
from ddp_lab.strategy.communication import int8
from ddp_lab.strategy.communication.int8 import BLOCK, FORGETTING_ROUNDS, LARGEST, Int8
from tests.models import make_batch
from tests.parity import built, message_of
from tests.ranks import RankPool
from tests.tables import each_row

SIZES = (0, 1, 2, 7, 255, 256 * 3, 257 * 3, 10_001)
"""Of gradients: fewer elements than ranks, and sizes that neither ranks nor blocks divide."""
elements = st.floats(-(2.0**120), 2.0**120, width=32)


# One message ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(elements, min_size=5, max_size=5), min_size=1, max_size=8))
@settings(deadline=None)
def test_a_message_loses_at_most_half_a_scale(rows):
    """Zeros stay zeros, and no element changes its sign."""
    blocks = torch.tensor(rows)
    arrived = int8.dequantize(int8.quantize(blocks))
    largest = blocks.abs().amax(-1, keepdim=True).double()
    scale = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    assert ((arrived.double() - blocks.double()).abs() <= scale / 2 * (1 + 1e-4)).all()
    assert arrived[blocks == 0].eq(0).all()
    assert (arrived * blocks >= 0).all()


@each_row("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_arrives_and_is_not_owed(bad):
    owed = torch.randn(2, 8)
    owed[1, 3] = bad
    arrived = int8.dequantize(int8.next_message(owed))
    assert arrived[0].isfinite().all() and not arrived[1].isfinite().any()
    assert owed.isfinite().all() and owed[0].any()


# One average ---------------------------------------------------------------------------------------------------------


def averages_of(sizes: tuple[int, ...], rounds: int) -> list[torch.Tensor]:
    """Averages of the ranks' random gradients of these sizes, in the last of `rounds` rounds."""
    method, generator = Int8(dist.group.WORLD), torch.Generator().manual_seed(dist.get_rank())
    for _ in range(rounds):
        flats = [torch.randn(size, generator=generator) for size in sizes]
        method.begin_round()
        handles = [method.all_reduce(flat) for flat in flats]
        for handle in handles:
            handle.wait()
    return flats


@each_row("world_size", [2, 3])
def test_ranks_are_bitwise_equal_at_any_size(ranks: RankPool, world_size):
    first, *replicas = ranks.run(world_size, averages_of, SIZES, 3)
    for replica in replicas:
        assert all(torch.equal(average, copy) for average, copy in zip(first, replica, strict=True))
    generators = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    for _ in range(3):
        means = [sum(torch.randn(size, generator=g) for g in generators) / world_size for size in SIZES]
    for average, mean in zip(first, means, strict=True):
        assert torch.allclose(average, mean, atol=0.06)  # a few times a scale, which is 4 / 127 at most


def average_of_integers(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The average of integers, and what it must be. Every block has a 127. Rank k has them times 2 (k + 1)."""
    pattern = torch.arange(3 * 4 * BLOCK).remainder(2 * LARGEST + 1).sub(LARGEST)
    flat = (pattern * 2 * (dist.get_rank() + 1)).to(dtype)
    Int8(dist.group.WORLD).all_reduce(flat).wait()
    return flat, (pattern * (dist.get_world_size() + 1)).to(dtype)


@each_row("dtype", [torch.float32, torch.float64])
def test_what_int8_holds_is_exact(ranks: RankPool, dtype):
    for average, expected in ranks.run(3, average_of_integers, dtype):
        assert average.dtype == dtype and torch.equal(average, expected)


def gathers_after_an_abandoned_round() -> int:
    """The number of all-gathers in a round of two gradients, after a round of three that nobody waited for."""
    method = Int8(dist.group.WORLD)
    for _ in range(3):
        method.all_reduce(torch.ones(10))
    with mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gather:
        method.begin_round()
        handles = [method.all_reduce(torch.ones(10)) for _ in range(2)]
        for handle in handles:
            handle.wait()
    return gather.call_count


def test_an_abandoned_round_is_not_gathered_later(ranks: RankPool):
    assert ranks.run(2, gathers_after_an_abandoned_round) == [2, 2]


# Error feedback ------------------------------------------------------------------------------------------------------

ROUNDS = 64


def mean_of_rounds(forgets: bool) -> tuple[float, float]:
    """The same gradients averaged in many rounds. The norms of the errors: of the mean of rounds, and of one round."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gradients = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(size)]
    mean, method = torch.stack(gradients).mean(0), Int8(dist.group.WORLD)
    rounds = []
    with mock.patch.object(int8, "FORGETTING_ROUNDS", ROUNDS) if forgets else mock.MagicMock():
        for _ in range(FORGETTING_ROUNDS + ROUNDS):
            rounds.append(gradients[rank].clone())
            method.begin_round()
            method.all_reduce(rounds[-1]).wait()
    settled = torch.stack(rounds[FORGETTING_ROUNDS:])
    return (settled.mean(0) - mean).norm().item(), (settled[0] - mean).norm().item()


@each_row("forgets", [False, True])
def test_what_is_lost_arrives_later(ranks: RankPool, forgets):
    """With feedback the sum of all rounds lacks what the last one owes. Without it, it lacks every round's loss."""
    for off, off_once in ranks.run(2, mean_of_rounds, forgets):
        assert off_once > 0
        assert off == pytest.approx(off_once, rel=1e-3) if forgets else off < 3 * off_once / ROUNDS


# In training ---------------------------------------------------------------------------------------------------------


def poisoned(choice: str, bad: float) -> tuple[str, bool, bool]:
    """A step in which rank 1's second micro-batch has a gradient that is not finite, and then a good step.

    Returns the first step's error, whether it kept the parameters, and whether they are finite after the second.
    """
    strategy = built(choice, compress="int8")
    module = strategy.module
    good = [make_batch("plain", 2, seed) for seed in (1, 2)]
    for _ in range(2):
        strategy.zero_grad()
        strategy.forward_backward(good)
        strategy.step()
    before = [p.detach().clone() for p in module.parameters()]
    weight = next(iter(module.parameters()))
    rounds = iter(range(100))

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        is_bad = next(rounds) % 2 == 1 and dist.get_rank() == 1
        return gradient.index_fill(0, torch.tensor([0]), bad) if is_bad else gradient

    hook = weight.register_hook(spoil)
    strategy.zero_grad()
    message = message_of(NonFiniteError, strategy.forward_backward, good)
    is_kept = all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    hook.remove()
    strategy.zero_grad()
    strategy.forward_backward(good)
    strategy.step()
    return message, is_kept, all(p.isfinite().all().item() for p in module.parameters())


@each_row("name", ["simple_ddp", "bucket_ddp_async", "pytorch_ddp"])
def test_nan_is_found_on_all_ranks(ranks: RankPool, name):
    """Before any update, with the rank to blame; and nothing of it is left for a later step."""
    for bad in (float("nan"), float("inf")):
        for message, is_kept, goes_on in ranks.run(2, poisoned, name, bad):
            assert "a gradient is not finite on rank 1" in message and is_kept and goes_on
