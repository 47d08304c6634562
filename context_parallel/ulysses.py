"""Ulysses: tokens are exchanged for heads around attention.

Outside of attention each rank has all heads of its part of the tokens. An all-to-all gives it all tokens of its part of
the heads, and any attention can follow, with its masks and dropout. A second all-to-all turns the result back. Backward
is the same two in reverse (Jacobs et al., 2023, "DeepSpeed Ulysses").

A rank sends (n-1)/n of its queries, keys, values and outputs, so 1/n as much as around a ring for each rank more. But
nothing hides it, and there can be no more ranks than heads.

Key-value heads that ranks do not divide are repeated until they do, and their gradients are summed.
"""

from collections.abc import Callable
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ddp_lab.runtime.errors import UnsupportedError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of (batch, heads, tokens, features): queries, keys, values to outputs. There may be fewer heads of keys."""


class AllToAll(torch.autograd.Function):
    """Part i of the first dimension goes to rank i; what rank i has sent is part i of the result."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return exchanged(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return exchanged(gradient, ctx.group), None


def exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


def ulysses(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, attend: Attend) -> Tensor:
    """Attention of the tokens of all ranks, which have contiguous parts of the sequence of one length.

    Shapes: queries and outputs (batch, heads, tokens of this rank, features), keys and values (batch, key-value heads,
    tokens of this rank, features).
    """
    size = dist.get_world_size(group)
    require_heads(q.shape[1], size)
    times = lcm(k.shape[1], size) // k.shape[1]
    if times > 1:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    by_rank = [tensor.unflatten(1, (size, -1)) for tensor in (q, k, v)]
    heads = [tensor.shape[2] for tensor in by_rank]
    received = AllToAll.apply(torch.cat(by_rank, 2).transpose(0, 1), group)  # (ranks, batch, heads, tokens, features)
    full_sequence = received.permute(1, 2, 0, 3, 4).flatten(2, 3)
    out = attend(*full_sequence.split(heads, 1))
    parts = out.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4)
    return AllToAll.apply(parts, group).transpose(0, 1).flatten(1, 2)


def require_heads(heads: int, size: int) -> None:
    """
    Raises:
        UnsupportedError: `size` ranks do not divide `heads`.
    """
    if heads % size:
        raise UnsupportedError(
            f"--context-parallel ulysses: {size} ranks of cp do not divide {heads} attention heads; take zigzag, or cp "
            "that divides them"
        )
