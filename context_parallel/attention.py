"""Where context parallelism meets a model: before it, after it, and in each attention.

A hook in front of the model takes the whole batch, which all ranks of cp have, and leaves of it this rank's tokens,
with their positions in the whole sequence. Labels are shifted before, so that each token keeps its target. A hook
after the model puts logits together that the caller wants. Attention of transformers' models asks a table for its
function by name; ours is in it under `NAME`.

The loss of a rank is a sum over its own targets, divided by the number of all ranks' targets, times the number of
ranks. So the mean over ranks is the mean over targets, and these ranks are for a strategy as ranks that see different
samples: their losses and gradients are averaged.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from context_parallel.ring import Ring, RingAttention
from context_parallel.ulysses import ulysses
from ddp_lab.runtime.data.masks import documents_of_tokens
from ddp_lab.runtime.data.packing import IGNORED
from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.settings.mesh import PYTORCH, ULYSSES, ZIGZAG

NAME = "ddp_lab_context_parallel"
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What an attention may be told, and is not done here."""


class Context:
    """What the attentions of one model share on a rank.

    Attributes:
        keys: Bytes and elements of the keys of an attention, of the latest micro-batch that was trained on.
        queries: Bytes of its queries, by which outputs are as large.
    """

    def __init__(self, group: dist.ProcessGroup, way: str) -> None:
        self.group, self.way = group, way
        self.ring = Ring(group, zigzag=way in (ZIGZAG, PYTORCH))
        self.keys, self.queries = (0, 0), 0
        self._length = 0  # of sequences in the latest forward pass

    def cut(self, module: nn.Module, args: Any, batch: dict[str, Any]) -> Any:
        """In front of the model: this rank's part of a batch."""
        tokens = batch.get("input_ids")
        if args or tokens is None:
            raise UnsupportedError("--mesh with cp: a batch must have input_ids by name, (samples, tokens)")
        samples, self._length = tokens.shape
        positions, mask, labels = (batch.get(name) for name in ("position_ids", "attention_mask", "labels"))
        documents = None if positions is None else documents_of_tokens(positions)
        if mask is not None:
            documents = mask.long() if documents is None else (documents + 1) * mask
        if positions is None:
            positions = torch.arange(self._length, device=tokens.device).expand(samples, -1)
        part = {"input_ids": self.part(tokens, 0), "position_ids": self.part(positions, 0)}
        if documents is not None:  # each rank needs the others', and four dimensions pass as they are
            part["attention_mask"] = self.filled(documents, 0)[:, None, None]
        if labels is not None:
            targets = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
            part["labels"] = part["shift_labels"] = self.part(targets, IGNORED)
            part["num_items_in_batch"] = (targets != IGNORED).sum() / self.ring.size
        other_inputs = {name: value for name, value in batch.items() if name not in (*part, "attention_mask")}
        return args, part | other_inputs

    def join(self, module: nn.Module, args: Any, batch: dict[str, Any], answer: Any) -> Any:
        """Hook after the model: logits of all tokens, in their order, if the caller has given no labels."""
        logits = answer.logits
        if batch.get("labels") is not None:
            answer.logits = None  # of a part of the tokens, in an order that the caller does not know
            return answer
        if torch.is_grad_enabled():
            raise UnsupportedError("--mesh with cp: the model computes its loss, so a batch must have labels")
        answer.logits = self.whole(logits, self._length)
        return answer

    def filled(self, tokens: Tensor, fill: int) -> Tensor:
        """(samples, tokens, ...), of as many tokens as ranks can cut."""
        no_padding = (0, 0) * (tokens.ndim - 2)
        return functional.pad(tokens, (*no_padding, 0, self.ring.layout.missing(tokens.shape[1])), value=fill)

    def part(self, tokens: Tensor, fill: int = 0) -> Tensor:
        """What this rank has of (samples, tokens, ...) once it is filled up."""
        return self.ring.layout.part(self.filled(tokens, fill), self.ring.rank)

    def whole(self, part: Tensor, length: int) -> Tensor:
        """All tokens of (samples, tokens of this rank, ...), in their order, without what filled them up. It has no
        gradient. Collective over the ranks of cp."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.ring.size)]
        dist.all_gather(parts, part.detach().contiguous(), group=self.group)
        return self.ring.layout.whole(parts)[:, :length]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, dropout: float) -> Tensor:
        """Causal attention of the tokens of all ranks, (batch, heads, tokens of this rank, features).

        Args:
            documents: See `RingAttention`.
        """
        if dropout and self.way != ULYSSES:
            raise UnsupportedError(
                f"context parallelism by {self.way} draws no dropout within attention (here {dropout:g}): set it to 0, "
                "which is attention_dropout or attn_pdrop in a model's config, or take ulysses"
            )
        if torch.is_autocast_enabled(kind := q.device.type):  # rotated queries and keys are in fp32
            q, k, v = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (q, k, v))
        if torch.is_grad_enabled() or not self.keys:
            self.keys, self.queries = (k.nbytes, k.numel()), q.nbytes
        if self.way == PYTORCH:
            from reference.pytorch_cp import TorchRing

            return TorchRing.apply(q, k, v, documents, self.ring, scale)
        if self.way != ULYSSES:
            return RingAttention.apply(q, k, v, documents, self.ring, scale)

        def of_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = None
            if documents is not None:
                mask = (documents[:, None, :, None] == documents[:, None, None]).tril()
            return functional.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )

        return ulysses(q, k, v, self.group, of_whole)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers' models call. `attention_mask`: the documents of all tokens, (batch, 1, 1, tokens)."""
    if unknown := [name for name in REFUSED if options.get(name) is not None]:
        raise UnsupportedError(f"--mesh with cp: {type(module).__name__} uses {unknown[0]}, which no ring does here")
    context: Any = module.context
    documents = None if attention_mask is None else attention_mask[:, 0, 0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return context.attend(query, key, value, documents, scale, dropout).transpose(1, 2), None
