"""`--loss-chunks`: head and loss of a language model, for a part of the tokens at a time.

With T tokens in a micro-batch and V in the vocabulary, a head makes T V logits. Their loss reads them in fp32 and keeps
as many log-probabilities for backward, which makes as many gradients: 12 T V bytes at once, often more than all blocks
hold. Here each chunk makes its logits, adds up its losses and forgets both. Backward makes the logits of a chunk again,
and from them what the chunk gives to the gradients of hidden states and head. So 1/N of all that exists at a time, for
four products of the head instead of three.

The loss is computed where the model calls its head, since a strategy that shards has the weight whole there. Labels are
taken from the call of the model. With them it answers with no logits, in evaluation neither.
"""

from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear, pad

from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.strategy.batches import IGNORED
from ddp_lab.strategy.modules import ModuleHook

FLAG = "--loss-chunks"


def chunk_loss(module: nn.Module, chunks: int) -> None:
    """Let the language model in `module` compute head and loss in so many parts. Names of parameters stay."""
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    model: Any = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    if model is None or "loss_function" not in unwrap(type(model).forward).__code__.co_names:
        raise UnsupportedError(f"{FLAG}: {type(module).__name__} is no causal language model of transformers")
    head = model.get_output_embeddings()
    if hasattr(head, "stands_for"):  # another stage of a pipeline has it
        return
    if model.loss_function is not ForCausalLMLoss or type(head) is not nn.Linear:
        raise UnsupportedError(f"{FLAG}: {type(model).__name__} has a head or a loss of its own; leave the flag out")
    chunked = ChunkedLoss(model, head, chunks)
    module.register_forward_pre_hook(ModuleHook(chunked.take_labels), with_kwargs=True)


class ChunkedLoss:
    """Stands in for the head's `forward`, where there are labels, and for the model's loss."""

    def __init__(self, model: Any, head: nn.Linear, chunks: int) -> None:
        self._head, self._logits, self._loss, self._chunks = head, head.forward, model.loss_function, chunks
        self._labels: Tensor | None = None
        self._output: Tensor | None = None
        head.forward = self._forward  # type: ignore[assignment]
        model.loss_function = self._answer

    def take_labels(self, _: nn.Module, __: Any, kwargs: Any) -> None:
        self._labels = kwargs.get("labels")
        if {"num_items_in_batch", "shift_labels"} & kwargs.keys():
            raise OneRankError(f"{FLAG}: takes labels alone, without num_items_in_batch and shift_labels")

    def _forward(self, hidden: Tensor) -> Tensor:
        labels, self._labels = self._labels, None
        if labels is None:
            return self._logits(hidden)
        targets = pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten()
        weight, bias = self._head.weight, self._head.bias
        self._output = ChunkedCrossEntropy.apply(hidden.flatten(0, -2), weight, bias, targets, self._chunks)
        return self._output

    def _answer(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        loss, self._output = self._output, None
        if loss is None:
            return self._loss(logits, labels, **options)
        if logits is not loss:
            raise OneRankError(f"{FLAG}: the model changes its logits after the head; leave the flag out")
        return loss


class ChunkedCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy over all targets, a scalar in fp32.

    Args:
        hidden: (tokens, features).
        weight, bias: Of the head, (vocabulary, features) and (vocabulary,) or None.
        targets: (tokens,), `IGNORED` for none.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunks: int) -> Tensor:
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        head = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        for part, labels in zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True):
            logits = linear(part.to(ctx.dtype), *head)
            total += cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        count = (targets != IGNORED).sum()
        ctx.save_for_backward(hidden, weight, bias, targets, count)
        ctx.chunks = chunks
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, count = ctx.saved_tensors
        dtype, needs_gradient = ctx.dtype, ctx.needs_input_grad
        head = weight.to(dtype), None if bias is None else bias.to(dtype)
        of_hidden = torch.empty_like(hidden)
        # Chunks are added up in fp32, whatever they are computed in: so the sum is rounded once.
        of_weight, of_bias = (
            torch.zeros_like(part, dtype=torch.float32) if wants else None
            for part, wants in zip((weight, bias), needs_gradient[1:3], strict=True)
        )
        for part, of_part, labels in zip(*(t.chunk(ctx.chunks) for t in (hidden, of_hidden, targets)), strict=True):
            inputs, is_target = part.to(dtype), (labels != IGNORED).unsqueeze(1)
            of_logits = linear(inputs, *head).float().softmax(-1)
            places = labels.unsqueeze(1).where(is_target, 0)
            of_logits.scatter_(1, places, of_logits.gather(1, places) - 1)
            of_logits = of_logits.mul_(is_target * (gradient / count)).to(dtype)
            of_part.copy_(of_logits @ head[0])
            if of_weight is not None and dtype == torch.float32:
                of_weight.addmm_(of_logits.T, inputs)
            elif of_weight is not None:
                of_weight += of_logits.T @ inputs
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            del of_logits  # before those of the next chunk
        return (
            of_hidden if needs_gradient[0] else None,
            of_weight if of_weight is None else of_weight.to(weight.dtype),
            of_bias if of_bias is None else of_bias.to(weight.dtype),
            None,
            None,
        )
