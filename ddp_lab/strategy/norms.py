"""Norms over tensors whose parts are on different ranks, and clipping by them. No part waits for the device."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def norm_of(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of all elements, an fp64 scalar on `device`, by one fused kernel.

    It is finite if, and only if, they all are. One that is larger than its dtype can hold counts as infinite. The
    tensors may be on the host.
    """
    found = [tensor.detach() for tensor in tensors]
    if not found:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found)), dtype=torch.float64).to(device)


def clip_parts(
    parts: Sequence[Tensor], max_norm: float, group: dist.ProcessGroup, device: torch.device, counted: Sequence[Tensor]
) -> Tensor:
    """Scale `parts` in place so that the norm over all ranks' parts is at most `max_norm`.

    Args:
        counted: Those, or parts of them, whose elements no other rank counts.

    Returns:
        The norm before that, the same on every rank. Squares are added in fp64, which holds those of any fp32 norm.
    """
    own = nn.utils.get_total_norm(counted) if counted else torch.zeros((), dtype=torch.float32, device=device)
    square = own.to(device, torch.float64).square()
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {part.dtype for part in parts}:
        precise = factor.to(parts[0].device, torch.promote_types(dtype, torch.float32))  # offloaded ones: on the host
        torch._foreach_mul_([part for part in parts if part.dtype == dtype], precise)
    return norm.float()
