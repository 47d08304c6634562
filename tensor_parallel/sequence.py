"""Sequence parallelism: between the parallel regions each rank keeps 1/N of the tokens.

Norms, dropouts and residuals treat each token by itself, so it does not matter which tokens are where. Here the tokens
of all samples are laid end to end, padded to a multiple of the ranks, and cut: (batch, sequence, features)
becomes (1, tokens / N, features). Gathered tokens are then contiguous, without a transpose. Attention and the head get
the tokens of all ranks in the old shape, the MLP needs no shape.

`SplitTokens` precedes the first block. `Gather` and `Scatter` are around each region (`tensor_parallel.operators`).
Behind the last norm, the head is a region too, or `MergeTokens` stands in front of what all ranks compute alike.
"""

from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ddp_lab.strategy.modules import tensors_in
from tensor_parallel.operators import Gather, Scatter, own_part


class SplitTokens(Scatter):
    """Where sequence parallelism begins: this rank's part of tokens that all ranks have alike, so there is nothing to
    add up. Backward is that of `Scatter`: all need the gradient of all tokens."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return own_part(whole, group).clone()


class MergeTokens(Gather):
    """Where it ends, in front of what all ranks compute alike. All make the same gradient of all tokens, so each keeps
    that of its own, and there is nothing to add up."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return own_part(gradient, ctx.group), None


class Tokens:
    """Cuts tokens over the ranks of a group, and brings them together.

    Attributes:
        is_active: Whether the latest forward pass cuts tokens. It holds until the next one begins, since backward may
            compute blocks again.
        is_merged: Whether they have been brought together for what follows all blocks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        self.is_active = self.is_merged = False
        self._shape = (0, 0)

    def split(self, hidden: Tensor) -> Tensor:
        """(batch, sequence, features) of which all ranks have the same, to (1, tokens of this rank, features)."""
        self._shape = hidden.shape[0], hidden.shape[1]
        return SplitTokens.apply(self._padded(hidden), self._group)[None]

    def gather(self, hidden: Tensor) -> Tensor:
        """The tokens of all ranks, in front of a region, (batch, sequence, features)."""
        return self._unpadded(Gather.apply(hidden[0], self._group))

    def merge(self, hidden: Tensor) -> Tensor:
        """The same, in front of what all ranks compute alike."""
        self.is_merged = True
        return self._unpadded(MergeTokens.apply(hidden[0], self._group))

    def scatter(self, terms: Tensor) -> Tensor:
        """Behind a region: the sum over ranks of (batch, sequence, features), to (1, tokens of this rank, features)."""
        return Scatter.apply(self._padded(terms), self._group)[None]

    def remember(self, answer: Any) -> None:
        """Let backward from what this forward pass `answer`s know its shape, though others have run in between."""
        shape = self._shape

        def again(_: Tensor) -> None:
            self._shape = shape

        for tensor in filter(attrgetter("requires_grad"), tensors_in(answer)):
            tensor.register_hook(again)

    def _padded(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, -2)
        missing = -len(flat) % self._size
        return functional.pad(flat, (0, 0, 0, missing)) if missing else flat

    def _unpadded(self, flat: Tensor) -> Tensor:
        batch, sequence = self._shape
        return flat[: batch * sequence].view(batch, sequence, -1)


def padded(tokens: int, ranks: int) -> int:
    """Tokens with those that fill them up to a multiple of the ranks."""
    return -(-tokens // ranks) * ranks
