"""All-reduces of gradients that are made smaller first. What arrives is rounded, so this is never a fair comparison.

- `bf16`: half of the bytes (of fp32 gradients) and 8 bits of mantissa, by PyTorch's own communication hook.
- `powersgd`: each matrix of gradients, n by m, travels as two vectors of n and m elements (Vogels et al., 2019,
  "PowerSGD", arXiv 1905.13727, at rank 1). What that loses is added to the next step's gradient. Vectors travel whole,
  and so do matrices of which that would not save half. PyTorch's hook for it does not fit: it starts its second and
  third collective when the one before is done, so that buckets overtake each other differently on each rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

WHOLE_ROUNDS = 2
"""PowerSGD's first rounds are not compressed: DDP arranges its buckets anew after the first."""
LEAST_SAVING = 2
"""A matrix is factored where that makes it smaller by more than this."""


class Gradients(Protocol):
    """What PyTorch's hooks know of `torch.distributed.GradBucket`, which only DDP can make."""

    def index(self) -> int:
        """The same in every step."""

    def buffer(self) -> Tensor:
        """(elements,) all gradients, to be averaged in place."""

    def gradients(self) -> Sequence[Tensor]:
        """Views into it, one a parameter."""


@dataclass(frozen=True)
class OwnGradients:
    """Gradients of a hand-written strategy; see `Gradients`."""

    place: int
    flat: Tensor
    parts: Sequence[Tensor]

    def index(self) -> int:
        return self.place

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> Sequence[Tensor]:
        return self.parts


class Compression:
    """Averages gradients over the ranks of `group`, compressed.

    Args:
        kind: `bf16` or `powersgd`.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup) -> None:
        self._powersgd = PowerSGD(group) if kind == "powersgd" else None
        self._group = group
        self._next_place = 0

    def begin_round(self) -> None:
        """The all-reduces of another backward pass follow."""
        self._next_place = 0

    def all_reduce(self, gradient: Tensor, parts: Sequence[Tensor]) -> Any:
        """Average `gradient` in place; the handle that is answered with can be waited for."""
        self._next_place += 1
        return self._average(OwnGradients(self._next_place, gradient.view(-1), parts))

    def register(self, ddp: DistributedDataParallel) -> None:
        """Let DDP reduce its buckets this way."""

        def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            return self._average(bucket)

        ddp.register_comm_hook(None, hook)

    def _average(self, gradients: Any) -> torch.futures.Future[Tensor]:
        if self._powersgd is None:
            return bf16_compress_hook(self._group, gradients)
        self._powersgd.average(gradients)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(gradients.buffer())
        return done

    def traffic(self, calls: int, gradients: Sequence[Tensor]) -> tuple[int, int]:
        """Calls and payload bytes of `calls` all-reduces of all `gradients` together. PowerSGD's once it has run."""
        if self._powersgd is None:
            return calls, sum(2 * gradient.numel() for gradient in gradients)
        return self._powersgd.traffic(calls)


class PowerSGD:
    """Rank-1 averages with error feedback and warm start. Every call is collective: the same order on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rounds: dict[int, int] = {}
        self._errors: dict[int, Tensor] = {}
        self._right: dict[int, list[Tensor]] = {}
        self._shapes: dict[int, list[torch.Size]] = {}
        self._element_size: dict[int, int] = {}

    def average(self, gradients: Gradients) -> None:
        """Replace all gradients by what is left of their average over ranks."""
        place, flat = gradients.index(), gradients.buffer()
        self._rounds[place] = self._rounds.get(place, 0) + 1
        self._element_size[place] = flat.element_size()
        self._shapes[place] = [part.shape for part in gradients.gradients()]
        if self._rounds[place] <= WHOLE_ROUNDS:
            dist.all_reduce(flat, dist.ReduceOp.AVG, self._group)
            return
        if place in self._errors:
            flat += self._errors[place]
        wanted = flat.clone()
        whole = [part.view(-1) for part in gradients.gradients() if not is_factored(part.shape)]
        matrices = [part.view(part.shape[0], -1) for part in gradients.gradients() if is_factored(part.shape)]
        right = self._right.get(place) or [random_direction(matrix) for matrix in matrices]
        left = [matrix @ vector for matrix, vector in zip(matrices, right, strict=True)]
        self._average_together([*whole, *left])
        left = [vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny) for vector in left]
        right = [matrix.T @ vector for matrix, vector in zip(matrices, left, strict=True)]
        self._average_together(right)
        for matrix, column, row in zip(matrices, left, right, strict=True):
            torch.outer(column, row, out=matrix)
        self._right[place] = [row / row.norm().clamp_min(torch.finfo(row.dtype).tiny) for row in right]
        self._errors[place] = wanted - flat

    def _average_together(self, tensors: list[Tensor]) -> None:
        if tensors:
            together = torch.cat(tensors)
            dist.all_reduce(together, dist.ReduceOp.AVG, self._group)
            for tensor, average in zip(tensors, together.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(average)

    def traffic(self, calls: int) -> tuple[int, int]:
        """See `Compression.traffic`."""
        rounds = calls // max(len(self._shapes), 1)
        counts = payload = 0
        for place, shapes in self._shapes.items():
            factored = [shape for shape in shapes if is_factored(shape)]
            whole = sum(math.prod(shape) for shape in shapes if not is_factored(shape))
            counts += 2 if factored else 1
            payload += self._element_size[place] * (whole + sum(sum(two_dimensions(shape)) for shape in factored))
        return rounds * counts, rounds * payload


def two_dimensions(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of a gradient as a matrix: the first dimension, and all others."""
    return shape[0], math.prod(shape[1:])


def is_factored(shape: torch.Size) -> bool:
    """Whether a gradient of this shape travels as two vectors."""
    return len(shape) > 1 and LEAST_SAVING * sum(two_dimensions(shape)) < math.prod(shape)


def random_direction(matrix: Tensor) -> Tensor:
    """(columns,) the same on every rank: where PowerSGD's first iteration starts."""
    generator = torch.Generator().manual_seed(matrix.shape[1])
    return torch.randn(matrix.shape[1], generator=generator, dtype=matrix.dtype).to(matrix.device)
