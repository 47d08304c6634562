"""Attention of some queries to some keys, with what is needed to put several such blocks together.

A kernel returns the output and the logarithm of the sum that it was divided by, for each query. Outputs over
different keys are then averaged, each weighted by its sum. Backward of a block is that of the whole if it is given the
whole's output and logarithm: it makes probabilities from the latter, and these are then the whole's.

The kernels are those that `scaled_dot_product_attention` would take.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

aten: Any = torch.ops.aten
LSE_UNIT = 32
"""The memory-efficient kernel reads logarithms of a multiple of so many queries."""


class Mask(NamedTuple):
    """Attributes:
    causal: Each query sees the keys up to its own place.
    bias: Or this is added to scores, (batch, 1, queries, keys) in their dtype.
    """

    causal: bool = False
    bias: Tensor | None = None


class OnCPU:
    """Any precision, with or without a bias."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask.causal, attn_mask=mask.bias, scale=scale
        )

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, mask.causal, attn_mask=mask.bias, scale=scale
        )


class Flash:
    """FlashAttention, in 16 bits and without a bias."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, mask.causal, scale=scale)
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
        lengths, unused = (q.shape[2], k.shape[2]), seed[:0]
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, mask.causal, seed, unused, scale=scale
        )


class Efficient:
    """xFormers' memory-efficient attention, on other GPUs, in other precisions, or with a bias."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        k, v, bias = *repeated(q, k, v), self._bias(q, mask)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, mask.causal, scale=scale)
        return out, lse[..., : q.shape[2]]

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, bias = k.shape[1], self._bias(q, mask)
        lse = functional.pad(lse, (0, -lse.shape[2] % LSE_UNIT), value=torch.inf)
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, *repeated(q, k, v), bias, out, lse, seed, seed, 0.0, [True, True, True, False], mask.causal,
            scale=scale,
        )  # fmt: skip
        return dq, *(repeats.unflatten(1, (heads, -1)).sum(2) for repeats in (dk, dv))

    @staticmethod
    def _bias(q: Tensor, mask: Mask) -> Tensor | None:
        return None if mask.bias is None else mask.bias.expand(-1, q.shape[1], -1, -1)


Kernel = OnCPU | Flash | Efficient
"""`forward` returns outputs and logarithms; `backward` the gradients of `q`, `k` and `v`, from that of the
outputs.

Shapes: queries and outputs (batch, heads, queries, features), keys and values (batch, key-value heads, keys, features),
logarithms (batch, heads, queries) in fp32, or fp64 of fp64."""


def repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of each head of the queries."""
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def kernel_for(q: Tensor, has_bias: bool) -> Kernel:
    """The fastest one that can do it."""
    if q.device.type == "cpu":
        return OnCPU()
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    is_new = q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) >= (8, 0)
    return Flash() if fits and is_new and not has_bias else Efficient()


def mask_of(documents: tuple[Tensor, Tensor] | None, causal: bool, dtype: torch.dtype) -> Mask:
    """What hides other documents.

    A query of which no key of this block is of its document gets a finite output, whose weight beside the others is 0.

    Args:
        documents: The number of the document of each query and each key, (batch, tokens). None: all are of one.
    """
    if documents is None:
        return Mask(causal)
    queries, keys = documents
    is_visible = queries[:, None, :, None] == keys[:, None, None, :]
    if causal:
        is_visible = is_visible.tril()
    return Mask(bias=torch.zeros_like(is_visible, dtype=dtype).masked_fill_(~is_visible, torch.finfo(dtype).min / 4))
