"""Layers whose weights are cut: by columns, by rows, or by the vocabulary. Each rank has its part under the old name.

A layer cut by columns needs no class: it is the old layer with fewer outputs. What stands in front of it is f
(`tensor_parallel.parallelize`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tensor_parallel.operators import Add, Copy, gathered
from tensor_parallel.region import TensorRanks


class RowParallel(nn.Module):
    """A linear layer with the inputs that this rank has. Its product is a term of the whole one, and g adds terms up.

    The bias is added once, to the sum.

    Args:
        weight: This rank's part of it, (outputs, inputs); transposed, (inputs, outputs).
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, ranks: TensorRanks, transposed: bool) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._ranks, self.transposed = ranks, transposed

    def forward(self, hidden: Tensor) -> Tensor:
        self._ranks.end_random()
        terms = functional.linear(hidden, self.weight.t() if self.transposed else self.weight)
        tokens, bias, group = self._ranks.active_tokens, self.bias, self._ranks.group
        if tokens is None:
            total = Add.apply(terms, group)
            return total if bias is None else total + bias
        local_sum = tokens.scatter(terms)
        return local_sum if bias is None else local_sum + Copy.apply(bias, group)  # other ranks add it to other tokens


class VocabularyParallelEmbedding(nn.Embedding):
    """Rows `first` and following of a lookup table. Other tokens give zeros here, and g adds up what ranks found."""

    def __init__(self, table: nn.Embedding, first: int, ranks: TensorRanks) -> None:
        nn.Module.__init__(self)
        weight = table.weight
        self.num_embeddings, self.embedding_dim = weight.shape
        padding = table.padding_idx
        self.padding_idx = padding - first if padding is not None and 0 <= padding - first < len(weight) else None
        self.max_norm, self.norm_type = None, table.norm_type
        self.scale_grad_by_freq, self.sparse = table.scale_grad_by_freq, False
        self.weight = weight
        self._first, self._ranks = first, ranks

    def forward(self, input: Tensor) -> Tensor:
        rows = input - self._first
        is_elsewhere = (rows < 0) | (rows >= len(self.weight))
        rows_here = super().forward(rows.masked_fill(is_elsewhere, 0))
        return Add.apply(rows_here.masked_fill(is_elsewhere[..., None], 0), self._ranks.group)


class WholeVocabulary(torch.autograd.Function):
    """The logits of all ranks, who go on alike. They may hold different numbers of entries."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.place = sum(lengths[: dist.get_rank(group)]), logits.shape[-1]
        even = functional.pad(logits, (0, max(lengths) - logits.shape[-1]))
        parts = gathered(even[None], group)
        return torch.cat([part[..., :length] for part, length in zip(parts, lengths, strict=True)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(-1, *ctx.place), None, None
