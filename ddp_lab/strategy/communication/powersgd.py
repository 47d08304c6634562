"""All-reduces of low rank (`--compress powersgd`): a matrix of gradients is sent as two vectors.

Vogels et al., 2019, "PowerSGD", arXiv 1905.13727, at rank 1: an n by m matrix is sent as n and m elements. What this
loses is added to the gradient of the next step. Vectors are sent whole, and so are matrices for which this would save
less than half. PyTorch's own hook is not used: it starts its second and third collective when the one before is done,
so the order of collectives can differ between ranks.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.strategy.accounting import Collective

WHOLE_ROUNDS = 2
"""The first rounds of PowerSGD are not compressed, because DDP rebuilds its buckets after the first one."""
LEAST_SAVING = 2
"""A matrix is factored if that makes it smaller by more than this factor."""


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

    def average(self, number: int, flat: Tensor, parts: Sequence[Tensor]) -> "Done":
        """Replace all gradients of a bucket by the rank-1 approximation of their average over ranks.

        Args:
            number: Of the bucket, the same in every step.
            flat: All gradients.
            parts: Views into `flat`, one for each parameter.
        """
        bucket = self._buckets[number]
        bucket.shapes, bucket.element_size = [part.shape for part in parts], flat.element_size()
        bucket.rounds += 1
        if bucket.rounds <= WHOLE_ROUNDS:
            dist.all_reduce(flat, dist.ReduceOp.AVG, self._group)
        else:
            self._average_factored(bucket, flat, parts)
        return Done()

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

    def traffic(self, calls: int, gradients: Sequence[Tensor]) -> list[Collective]:
        """What replaces `calls` all-reduces; see `compression.Compression.traffic`."""
        rounds = calls // max(len(self._buckets), 1)
        counts = payload = 0
        for bucket in self._buckets.values():
            factored = [shape for shape in bucket.shapes if is_factored(shape)]
            whole = sum(math.prod(shape) for shape in bucket.shapes if not is_factored(shape))
            counts += 2 if factored else 1
            payload += bucket.element_size * (whole + sum(sum(two_dimensions(shape)) for shape in factored))
        return [Collective("all_reduce", rounds * counts, rounds * payload, self._group.size(), "gradients")]


class Done:
    """The handle of an average that is there already."""

    def wait(self) -> None:
        """Return at once."""


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
    return torch.randn(matrix.shape[1], generator=generator, dtype=matrix.dtype, device="cpu").to(matrix.device)
