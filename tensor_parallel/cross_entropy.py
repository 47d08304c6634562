"""Cross entropy over a vocabulary that is cut over ranks, without gathering the logits.

The loss of a token is log(sum of exp(logits)) - logit of the target. Both terms are sums over the vocabulary, so each
rank adds up its own part and the ranks add up two numbers a token: 2 x 4 bytes instead of 4 bytes for each entry of the
vocabulary. Before that they agree on the largest logit, which is subtracted so that no exponential overflows: one
number more. The gradient of a logit is its softmax, less 1 for the target, and needs nobody else.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

NUMBERS = 3
"""Numbers in fp32 that are all-reduced for each token, in `CALLS` calls."""
CALLS = 2


class VocabularyParallelCrossEntropy(torch.autograd.Function):
    """The loss of each token, (tokens,) in fp32.

    Args:
        logits: This rank's entries of the vocabulary, (tokens, entries).
        targets: Entries of the whole vocabulary, (tokens,). A token whose target is none of them has a loss that means
            nothing, and must get no gradient.
        first: The first entry on this rank.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        logits = logits.float()
        largest = logits.amax(-1) if logits.shape[1] else logits.new_full(logits.shape[:1], -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        exponentials = (logits - largest[:, None]).exp_()
        entries = targets - first
        is_here = (entries >= 0) & (entries < logits.shape[1])
        entries = entries.where(is_here, 0)
        of_target = (
            logits.gather(1, entries[:, None]).squeeze(1) - largest if logits.shape[1] else torch.zeros_like(largest)
        )
        sums = torch.stack([exponentials.sum(-1), of_target.where(is_here, 0)])
        dist.all_reduce(sums, group=group)
        total, of_target = sums
        ctx.save_for_backward(exponentials.div_(total[:, None]), entries, is_here)
        return total.log() - of_target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, entries, is_here = ctx.saved_tensors
        gradients = softmax * gradient[:, None]
        if softmax.shape[1]:
            gradients.scatter_add_(1, entries[:, None], -(gradient * is_here)[:, None])
        return gradients, None, None, None
