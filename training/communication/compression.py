"""All-reduces of compressed gradients. The result is rounded, so it does not compare with uncompressed training.

- `bf16` (`--reduce-dtype bf16`): half of the bytes of fp32 gradients, with 8 bits of mantissa: each rank rounds its
  share, 1/N of its gradient, and sums are rounded too. DDP does this by PyTorch's own communication hook, and the
  result is bitwise the same.
- `powersgd` (`--compress powersgd`): each n by m matrix of gradients is sent as two vectors of n and m elements (Vogels
  et al., 2019, "PowerSGD", arXiv 1905.13727, at rank 1). What this loses is added to the gradient of the next step.
  Vectors are sent whole, and so are matrices for which this would save less than half. PyTorch's own hook is not used:
  it starts its second and third collective when the one before is done, so the order of collectives can differ between
  ranks.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

WHOLE_ROUNDS = 2
"""The first rounds of PowerSGD are not compressed, because DDP rebuilds its buckets after the first one."""
LEAST_SAVING = 2
"""A matrix is factored if that makes it smaller by more than this factor."""


class Compression:
    """Averages gradients over the ranks of `group`, compressed.

    Args:
        kind: `bf16` or `powersgd`.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup) -> None:
        self._powersgd = PowerSGD(group) if kind == "powersgd" else None
        self._group = group
        self._next_number = 0

    def begin_round(self) -> None:
        """The all-reduces of the next backward pass follow."""
        self._next_number = 0

    def all_reduce(self, gradient: Tensor, parts: Sequence[Tensor]) -> Any:
        """Average `gradient` in place. Returns a handle to wait for.

        Args:
            parts: Views into it, one for each parameter.
        """
        if self._powersgd is None:
            return RoundedAllReduce(gradient, self._group)
        self._next_number += 1
        return self._powersgd.average(self._next_number, gradient.view(-1), parts)

    def register(self, ddp: DistributedDataParallel) -> None:
        """Let DDP reduce its buckets this way."""

        def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            if self._powersgd is None:
                return bf16_compress_hook(self._group, bucket)
            return self._powersgd.average(bucket.index(), bucket.buffer(), bucket.gradients())

        ddp.register_comm_hook(None, hook)

    def traffic(self, calls: int, gradients: Sequence[Tensor]) -> tuple[int, int]:
        """Calls and payload bytes that replace `calls` all-reduces of `gradients`. For PowerSGD: once it has run."""
        if self._powersgd is None:
            return calls, sum(2 * gradient.numel() for gradient in gradients)
        return self._powersgd.traffic(calls)


class RoundedAllReduce:
    """An all-reduce of a gradient's bf16 copy that has been started.

    PyTorch's hook asks the collective for its future, and with torch's `nccl` the compute stream then waits at once
    (docs/cuda.md). This asks for nothing before `wait`, so that backward goes on meanwhile.
    """

    def __init__(self, gradient: Tensor, group: dist.ProcessGroup) -> None:
        self._gradient = gradient
        self._rounded = gradient.to(torch.bfloat16).div_(group.size())
        self._work = dist.all_reduce(self._rounded, group=group, async_op=True)

    def wait(self) -> None:
        """Put the average into the gradient. Once."""
        self._work.wait()
        self._gradient.copy_(self._rounded)
        del self._work, self._rounded  # whoever keeps this handle keeps no memory


@dataclass
class Bucket:
    """What PowerSGD keeps of a bucket between steps."""

    shapes: Sequence[torch.Size] = ()
    element_size: int = 0
    rounds: int = 0
    error: Tensor | None = None
    right: list[Tensor] = field(default_factory=list)


class PowerSGD:
    """Rank-1 averages with error feedback and warm start. Calls are collective and in the same order on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets: dict[int, Bucket] = defaultdict(Bucket)

    def average(self, number: int, flat: Tensor, parts: Sequence[Tensor]) -> torch.futures.Future[Tensor]:
        """Replace all gradients of a bucket by the rank-1 approximation of their average over ranks.

        Args:
            number: Of the bucket, the same in every step.
            flat: All gradients, (elements,).
            parts: Views into `flat`, one for each parameter.

        Returns:
            `flat`, when it is averaged, which it is already.
        """
        bucket = self._buckets[number]
        bucket.shapes, bucket.element_size = [part.shape for part in parts], flat.element_size()
        bucket.rounds += 1
        if bucket.rounds <= WHOLE_ROUNDS:
            dist.all_reduce(flat, dist.ReduceOp.AVG, self._group)
        else:
            self._average_factored(bucket, flat, parts)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done

    def _average_factored(self, bucket: Bucket, flat: Tensor, parts: Sequence[Tensor]) -> None:
        if bucket.error is not None:
            flat += bucket.error
        wanted = flat.clone()
        whole = [part.view(-1) for part in parts if not is_factored(part.shape)]
        matrices = [part.view(part.shape[0], -1) for part in parts if is_factored(part.shape)]
        right = bucket.right or [random_direction(matrix) for matrix in matrices]
        left = [matrix @ vector for matrix, vector in zip(matrices, right, strict=True)]
        self._average_together([*whole, *left])
        left = [normalized(vector) for vector in left]
        right = [matrix.T @ vector for matrix, vector in zip(matrices, left, strict=True)]
        self._average_together(right)
        for matrix, column, row in zip(matrices, left, right, strict=True):
            torch.outer(column, row, out=matrix)
        bucket.right = [normalized(row) for row in right]
        bucket.error = wanted - flat

    def _average_together(self, tensors: list[Tensor]) -> None:
        if tensors:
            together = torch.cat(tensors)
            dist.all_reduce(together, dist.ReduceOp.AVG, self._group)
            for tensor, average in zip(tensors, together.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(average)

    def traffic(self, calls: int) -> tuple[int, int]:
        """See `Compression.traffic`."""
        rounds = calls // max(len(self._buckets), 1)
        counts = payload = 0
        for bucket in self._buckets.values():
            factored = [shape for shape in bucket.shapes if is_factored(shape)]
            whole = sum(math.prod(shape) for shape in bucket.shapes if not is_factored(shape))
            counts += 2 if factored else 1
            payload += bucket.element_size * (whole + sum(sum(two_dimensions(shape)) for shape in factored))
        return rounds * counts, rounds * payload


def normalized(vector: Tensor) -> Tensor:
    return vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)


def two_dimensions(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of a gradient as a matrix: its first dimension, and all others together."""
    return shape[0], math.prod(shape[1:])


def is_factored(shape: torch.Size) -> bool:
    """Whether a gradient of this shape is sent as two vectors."""
    return len(shape) > 1 and LEAST_SAVING * sum(two_dimensions(shape)) < math.prod(shape)


def random_direction(matrix: Tensor) -> Tensor:
    """The start of PowerSGD's first iteration, (columns,), the same on every rank."""
    generator = torch.Generator().manual_seed(matrix.shape[1])
    return torch.randn(matrix.shape[1], generator=generator, dtype=matrix.dtype).to(matrix.device)
