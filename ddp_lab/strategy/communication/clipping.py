"""Clipping of gradients whose parts are on different ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.strategy.communication.traffic import EVERYONE, Collective


def clip_parts(
    parts: Sequence[Tensor],
    max_norm: float,
    group: dist.ProcessGroup,
    device: torch.device,
    counted: Sequence[Tensor],
) -> Tensor:
    """Scale `parts` in place so that the norm over all ranks' parts is at most `max_norm`.

    Args:
        counted: Those, or parts of them, whose elements no other rank counts.

    Returns:
        The norm before that, the same on every rank. Squares are added in fp64, which holds those of any fp32 norm.
    """
    own = nn.utils.get_total_norm(counted) if counted else torch.zeros((), device=device)
    square = own.to(device, torch.float64).square()
    dist.all_reduce(square, group=group)
    norm = square.sqrt().float()
    if parts:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(parts), factor.to(parts[0].device))  # offloaded ones are on the host
    return norm


def clipping_traffic(group: dist.ProcessGroup) -> Collective:
    """What `clip_parts` sends. `group`: all ranks that train the model."""
    return Collective("all_reduce", 1, 8, dist.get_world_size(group), "bookkeeping", EVERYONE)
