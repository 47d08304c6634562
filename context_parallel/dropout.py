"""Dropout within the attention of a ring.

Queries stay where they are, so a rank draws the masks of all its blocks by itself: in forward, and again in backward
from the same state of the generators. No other rank has to know them, and none is kept or sent.

Dropout acts on probabilities after they have been divided by their sum. So the sums by which outputs of blocks are put
together are those without it. The kernels of GPUs draw masks each in its own way, and that of a CPU draws none. So here
a block is plain products in fp32, and up to six tensors of its scores exist until the next block. No policy of
selective recomputation sees these products, or it would keep them for all blocks.
"""

from collections import deque

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from context_parallel.blocks import Mask, repeated
from ddp_lab.strategy.recompute.checkpoint import State


class Dropped:
    """A `context_parallel.blocks.Kernel` of one attention; its backward goes through the same blocks in the same order.

    Args:
        probability: That a probability becomes 0. The others are divided by 1 - `probability`.
    """

    def __init__(self, probability: float) -> None:
        self._probability = probability
        self._states: deque[State] = deque()  # one of the generators before each block

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False), _disable_current_modes():
            self._states.append(State({q.device}))
            _, _, values, scores, factors = self._begun(q, k, v, mask, scale)
            lse = scores.logsumexp(-1)
            return ((scores - lse[..., None]).exp_().mul_(factors) @ values).to(q.dtype), lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, gradient: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._states.rotate(-1)
        with self._states[-1].again(), torch.autocast(q.device.type, enabled=False):
            queries, keys, values, scores, factors = self._begun(q, k, v, mask, scale)
            gradient, probabilities = gradient.to(scores.dtype), (scores - lse[..., None]).exp_()
            of_probabilities = (gradient @ values.mT).mul_(factors)
            of_scores = (of_probabilities - (gradient * out).sum(-1, keepdim=True)) * probabilities * scale
            of_k, of_v = of_scores.mT @ queries, (probabilities * factors).mT @ gradient
            return of_scores @ keys, *(one.unflatten(1, (k.shape[1], -1)).sum(2) for one in (of_k, of_v))

    def _begun(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, ...]:
        """Queries, keys and values of each head, the scores of the block, and the factors of its probabilities."""
        queries, keys, values = (one.to(torch.promote_types(q.dtype, torch.float32)) for one in (q, *repeated(q, k, v)))
        scores = (queries @ keys.mT).mul_(scale)
        if mask.bias is not None:
            scores += mask.bias
        if mask.causal:
            scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), -torch.inf)
        return queries, keys, values, scores, functional.dropout(torch.ones_like(scores), self._probability)
