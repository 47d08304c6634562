"""PyTorch's own ring attention: what `torch.distributed.tensor.experimental.context_parallel` runs.

The public function has it on CUDA alone, and without documents: it replaces kernels that CPUs do not have. So its two
templates are called here, which take any kernel, and get those of the hand-written ring, with its masks. Tokens lie as
torch's default has them: an early and a late chunk on each rank, which is `zigzag`. By torch's default, too, keys and
values are gathered once, after the first block, and do not go around; in backward they are gathered again, and their
gradients go around.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor.experimental._context_parallel import _attention

from context_parallel.blocks import Mask, kernel_for
from context_parallel.ring import Ring

torchs: Any = _attention
TOKENS = 2
"""The dimension of tokens in queries, keys and values."""


class TorchRing(torch.autograd.Function):
    """Causal attention of the tokens of all ranks, as `context_parallel.ring.RingAttention`, in zigzag order."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring, scale: float
    ) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
            return kernel.forward(q, k, v, next(masks), scale)

        kernel, masks = kernel_for(q, documents is not None), iter(masks_of(ring, q, documents))
        torchs._cp_options.enable_load_balance = True  # the default, which other calls of torch's turn off
        out, lse, *_ = torchs._templated_ring_attention(ring.group, TOKENS, attend, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse, documents)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **saved: Tensor) -> tuple[Tensor, ...]:
            of_whole = saved["out"], saved["logsumexp"], saved["dout"]
            return kernel.backward(query, key, value, *of_whole, next(masks), ctx.scale)

        q, k, v, out, lse, documents = ctx.saved_tensors
        kernel, masks = kernel_for(q, documents is not None), iter(masks_of(ctx.ring, q, documents))
        torchs._cp_options.enable_load_balance = True
        dq, dk, dv = torchs._templated_ring_attention_backward(
            ctx.ring.group, TOKENS, attend, dout, "dout", q, k, v, out, lse, is_causal=True
        )
        return dq, dk, dv, None, None, None


def masks_of(ring: Ring, q: Tensor, documents: Tensor | None) -> list[Mask]:
    """Masks in torch's order of blocks: a rank's own keys, then those of the ranks before it. Torch takes the same part
    of each block as the hand-written ring."""
    sources = [(ring.rank - step) % ring.size for step in range(ring.size)]
    visible = [ring.visible_block(source, q.shape[TOKENS], documents, q.dtype) for source in sources]
    return [mask for _, mask in filter(None, visible)]
