"""Gradients whose parts are on different ranks are clipped by the norm of all, and left alone below it."""

import pytest
import torch
import torch.distributed as dist

from ddp_lab.strategy.account import clip_parts
from tests.ranks import RankPool


def clip_ones(max_norm: float) -> list[float]:
    """The norm of two ones on each rank, and what becomes of them."""
    assert dist.group.WORLD is not None
    part = torch.ones(2)
    norm = clip_parts([part], max_norm, dist.group.WORLD, part.device, [part])
    return [norm.item(), *part.tolist()]


def test_only_a_larger_norm_is_scaled(ranks: RankPool):
    assert ranks.run(2, clip_ones, 3.0) == [[2.0, 1.0, 1.0]] * 2
    assert ranks.run(2, clip_ones, 1.0) == [pytest.approx([2.0, 0.5, 0.5], rel=1e-5)] * 2
