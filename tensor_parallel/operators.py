"""f and g, the two operators of tensor parallelism, and their counterparts for sequence parallelism.

Cut the first matrix of an MLP by columns and the second by rows: Y = act(X A) B = sum over ranks of act(X A_r) B_r. The
activation sits between the two and sees whole columns, so each rank computes its term alone. Two places need the
others, one before the first matrix and one after the second. There are two operators, each the other's conjugate:

- f, in front: forward does nothing, since all ranks have X. In backward each rank has made the gradient of X for its
  columns only, and f adds these up (all-reduce).
- g, after: forward adds up the terms of all ranks (all-reduce). Backward does nothing, since each term has the
  gradient of the sum.

A pair costs one all-reduce in forward and one in backward. A transformer block has two pairs, one around attention (cut
by heads) and one around the MLP (Shoeybi et al., 2019, "Megatron-LM", section 3).

Between g and the next f all ranks compute the same norms, dropouts and residuals, and keep the same activations.
Sequence parallelism cuts these tokens over ranks instead. An all-reduce is a reduce-scatter and an all-gather. So g
becomes a reduce-scatter of tokens in forward and an all-gather in backward, and f the opposite: as many bytes on the
wire, and 1/N of these activations (Korthikanti et al., 2022, "Reducing activation recomputation", section 4.2.2).

A parameter that all ranks hold, but use on different tokens or heads, gets a part of its gradient on each. f in front
of the parameter adds these up.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ddp_lab.strategy.communication.collectives import all_gather, reduce_scatter
from ddp_lab.strategy.recompute import keeps_outputs


class Add(torch.autograd.Function):
    """g: the sum over ranks; the gradient is the sum's. Mostly writes the sum into its input."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, group: dist.ProcessGroup) -> Tensor:
        if keeps_outputs():
            term = term.clone()
        else:
            ctx.mark_dirty(term)
        dist.all_reduce(term, group=group)
        return term

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Copy(torch.autograd.Function):
    """f: the same on all ranks; the gradient is the sum over ranks of what each has made."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)  # autograd may show it to others too
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Scatter(torch.autograd.Function):
    """g of sequence parallelism: this rank's tokens of the sum over ranks. Tokens are dimension 0, a multiple of the
    ranks."""

    @staticmethod
    def forward(ctx: Any, terms: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(terms, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.group), None


class Gather(torch.autograd.Function):
    """f of sequence parallelism: the tokens of all ranks. Ranks make different gradients of them, whose sum over ranks
    is scattered."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return scattered(gradient, ctx.group), None


def own_part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks along dimension 0."""
    size = dist.get_world_size(group)
    whole = part.new_empty(size * part.shape[0], *part.shape[1:])
    own_part(whole, group).copy_(part)
    all_gather(whole.view(-1), group).wait()
    return whole


def scattered(terms: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, along dimension 0, of the sum over ranks."""
    part = torch.empty_like(own_part(terms, group), memory_format=torch.contiguous_format)
    reduce_scatter(part.view(-1), terms.contiguous().view(-1), group).wait()
    return part
