"""Ring attention: queries stay, keys and values go around.

Each rank has the queries, keys and values of its part of the tokens. It attends to its own keys first, then to those
of the rank before it, and so on. While it computes a block, the keys and values of the next one are on their way, so
that only what takes longer than a block is waited for. Outputs of blocks are put together by the logarithms of their
sums, in fp32 (Liu et al., 2023, "Ring attention with blockwise transformers").

In backward keys and values go around once more, followed by their gradients in fp32: each rank adds its part to
what comes in, and sends it on. The gradients of a rank's own keys arrive at home with the last message. A rank sends
2(n-1) messages of its keys and values, and n-1 of their gradients, for each attention of a step.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from context_parallel.blocks import Kernel, Mask, kernel_for, mask_of
from context_parallel.layout import AttentionBlock, SequenceLayout


class Coming:
    """A tensor on its way here, and the one that goes out at the same time."""

    def __init__(self, sent: Tensor, received: Tensor, works: list[dist.Work]) -> None:
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


class Ring:
    """Ranks in a circle: each sends to the next and receives from the one before."""

    def __init__(self, group: dist.ProcessGroup, zigzag: bool = False) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.layout = SequenceLayout(self.size, zigzag)

    def shift(self, tensor: Tensor) -> Coming:
        """Send a contiguous tensor to the next rank, and receive one like it."""
        received, after, before = torch.empty_like(tensor), (self.rank + 1) % self.size, (self.rank - 1) % self.size
        messages = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
        ]
        return Coming(tensor, received, dist.batch_isend_irecv(messages))

    def turns(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The rank that a tensor comes from, and the tensor: this rank's, then those of the ranks before it. The next
        one travels while the caller works."""
        tensor = local
        for step in range(self.size - 1):
            coming = self.shift(tensor)
            yield (self.rank - step) % self.size, tensor
            tensor = coming.wait()
        yield (self.rank + 1) % self.size, tensor

    def visible_block(
        self, source: int, length: int, documents: Tensor | None, dtype: torch.dtype
    ) -> tuple[AttentionBlock, Mask] | None:
        """The block of this rank's queries and the keys of `source`; None if it is empty.

        Args:
            length: Tokens of each rank.
            documents: See `RingAttention`.
            dtype: Of the scores.
        """
        block, parts = self.layout.block(self.rank, source, length), None
        if block is not None and documents is not None:
            queries, keys = self.layout.part(documents, self.rank), self.layout.part(documents, source)
            parts = queries[:, block.first_query :], keys[:, : block.keys]
        return None if block is None else (block, mask_of(parts, block.causal, dtype))


class RingAttention(torch.autograd.Function):
    """Causal attention of the tokens of all ranks.

    Shapes: queries (batch, heads, tokens of this rank, features), keys and values (batch, key-value heads, tokens of
    this rank, features), in the order of the ring's layout.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring, scale: float
    ) -> Tensor:
        """
        Args:
            documents: The number of the document of each token of the whole sequence, (batch, tokens of all ranks).
                Tokens see their own document alone. None: there is one.
        """
        kernel = kernel_for(q, documents is not None)
        exact = torch.promote_types(q.dtype, torch.float32)
        out = lse = q
        for source, kv in ring.turns(torch.stack([k, v])):
            if (visible := ring.visible_block(source, q.shape[2], documents, q.dtype)) is None:
                continue
            block, mask = visible
            block_out, block_lse = kernel.forward(*block.of(q, *kv), mask, scale)
            if source == ring.rank:
                out, lse = block_out.to(exact, copy=True), block_lse.clone(memory_format=torch.contiguous_format)
                continue
            # rescale: the share of this block in the sums of the queries that see it
            out_so_far, lse_so_far = (tensor[:, :, block.first_query :] for tensor in (out, lse))
            out_so_far.lerp_(block_out.to(exact), (block_lse - lse_so_far).sigmoid()[..., None])
            lse_so_far.copy_(torch.logaddexp(lse_so_far, block_lse))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, documents)
        ctx.ring, ctx.kernel, ctx.scale = ring, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, documents = ctx.saved_tensors
        ring: Ring = ctx.ring
        kernel: Kernel = ctx.kernel
        exact = torch.promote_types(q.dtype, torch.float32)
        dq, dkv = torch.zeros_like(q, dtype=exact), torch.zeros((2, *k.shape), dtype=exact, device=k.device)
        coming: Coming | None = None  # of the keys and values that the rank before has used
        for source, kv in ring.turns(torch.stack([k, v])):
            source_dkv = dkv if source == ring.rank else torch.zeros_like(dkv)
            if (visible := ring.visible_block(source, q.shape[2], documents, q.dtype)) is not None:
                block, mask = visible
                block_out, block_lse, block_dout = (tensor[:, :, block.first_query :] for tensor in (out, lse, dout))
                block_dq, *block_dkv = kernel.backward(
                    *block.of(q, *kv), block_out, block_lse, block_dout, mask, ctx.scale
                )
                dq[:, :, block.first_query :] += block_dq
                for total, part in zip(source_dkv, block_dkv, strict=True):
                    total[:, :, : block.keys] += part
            if source != ring.rank:
                source_dkv = source_dkv if coming is None else source_dkv.add_(coming.wait())
                coming = ring.shift(source_dkv)
        dk, dv = dkv if coming is None else dkv.add_(coming.wait())
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None
