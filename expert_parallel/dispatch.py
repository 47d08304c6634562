"""Tokens go to the ranks that hold their experts, and come back.

Each rank has its own tokens and some of the experts, as many as every other. For each layer:
- Ranks tell each other how many tokens go to each expert: an all-to-all of counts. The host waits for these, since it
  must know how long the messages are. On a GPU this is one wait for each layer and forward pass.
- An all-to-all takes each token to the ranks of its experts, once for each expert. It is in the order of experts, and
  what arrives is sorted by expert again, so that each expert multiplies one block of rows.
- Another all-to-all takes the rows back, where they are put in order, weighted and added up.

Backward is the same two all-to-alls in reverse. Counts are known by then. A rank without tokens, or with experts that
nobody chose, takes part with no rows (Lepikhin et al., 2020, "GShard").

A token that k experts get is sent k times: T tokens of H features make k T rows of H features, there and back. Under
autocast they are in its dtype, in which experts multiply them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tensor_parallel.region import as_factor

Compute = Callable[[Tensor, Sequence[int], Tensor], Tensor]
"""Experts of rows (rows, features) that are sorted by expert. The number of rows of each expert, for the host and for
the device."""


class ExpertExchange(torch.autograd.Function):
    """The first `sent[0]` rows go to rank 0, the next `sent[1]` to rank 1, and so on; what comes is in that order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = (sent, received), group
        return exchanged(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.lengths
        return exchanged(gradient, received, sent, ctx.group), None, None, None


def exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def through_experts(
    hidden: Tensor, chosen: Tensor, weights: Tensor, experts: int, compute: Compute, group: dist.ProcessGroup
) -> tuple[Tensor, int]:
    """The outputs of all ranks' experts for this rank's tokens. Collective.

    Args:
        hidden: (tokens, features).
        chosen: For each token the numbers of its experts, (tokens, k).
        weights: Of their outputs, (tokens, k).
        experts: Of all ranks. Rank r holds the r-th part of them, in order.

    Returns:
        The weighted sums, (tokens, features); bytes of the rows that this rank has sent and got back.
    """
    places = chosen.flatten()
    counts = hidden.new_zeros(experts, dtype=torch.int64).scatter_add_(0, places, torch.ones_like(places))
    row_counts = exchange_counts(counts, group)
    going, coming = on_host(row_counts, len(places))
    sent, received = ([sum(of_rank) for of_rank in by_rank] for by_rank in (going, coming))
    lengths, arriving = [sum(of_expert) for of_expert in zip(*coming, strict=True)], row_counts[1]
    order = places.argsort(stable=True)
    leaving = as_factor(hidden[order // chosen.shape[1]])
    arrived = ExpertExchange.apply(leaving, sent, received, group)
    size, local_experts = arriving.shape
    numbers = torch.arange(local_experts, device=hidden.device).repeat(size)
    by_expert = numbers.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
    outputs = compute(arrived[by_expert], lengths, arriving.sum(0))[by_expert.argsort()]
    back = ExpertExchange.apply(outputs, received, sent, group)
    rows = torch.empty_like(back).index_copy(0, order, back)
    summed = (rows.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)
    return summed.to(hidden.dtype), sum(sent) * hidden.shape[1] * (leaving.itemsize + back.itemsize)


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The numbers of rows that this rank sends to each rank's experts, and receives from each rank for each of its
    experts, (2, ranks, experts of a rank). Collective.

    Args:
        counts: Rows of this rank for each expert of all ranks.
    """
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    return torch.stack([counts, arriving]).view(2, dist.get_world_size(group), -1)


def on_host(row_counts: Tensor, rows: int) -> list[list[list[int]]]:
    """The result of `exchange_counts` on the host: the only wait for the device. The planner, which has no counts,
    replaces this function and estimates them from `rows`, the number that this rank sends."""
    return row_counts.tolist()
