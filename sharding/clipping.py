"""Gradient clipping where each rank holds a part of the gradients: every element counts once in the norm."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.communication.traffic import Collective


def clip_shards(shards: Sequence[Tensor], max_norm: float, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Scale shards in place so that the norm over all ranks' shards is at most `max_norm`.

    Returns:
        The norm before that, the same on every rank. Squares are added in fp64, which holds those of any fp32 norm.
    """
    own = nn.utils.get_total_norm(shards) if shards else torch.zeros(())
    square = own.to(device, torch.float64).square()
    dist.all_reduce(square, group=group)
    norm = square.sqrt().float()
    if shards:
        torch._foreach_mul_(list(shards), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def clipping_traffic(group: dist.ProcessGroup) -> list[Collective]:
    """What `clip_shards` sends."""
    return [Collective("all_reduce", 1, 8, dist.get_world_size(group), "bookkeeping")]
