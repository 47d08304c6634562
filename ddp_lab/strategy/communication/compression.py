"""All-reduces of compressed gradients. The result is rounded, so it does not compare with uncompressed training.

- `bf16` (`--reduce-dtype bf16`, here): half of the bytes of fp32 gradients, with 8 bits of mantissa: each rank rounds
  its share, 1/N of its gradient, and sums are rounded too. DDP does this by PyTorch's own communication hook, and the
  result is bitwise the same.
- `int8` (`--compress int8`, `communication.int8`): a quarter of the bytes. What rounding loses is added later.
- `powersgd` (`--compress powersgd`, `communication.powersgd`): a matrix is sent as two vectors. What this loses is
  added later.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.strategy.accounting import Collective
from ddp_lab.strategy.communication.int8 import Int8
from ddp_lab.strategy.communication.powersgd import PowerSGD


class Handle(Protocol):
    """An average under way."""

    def wait(self) -> None:
        """Put the average into the gradient. Once, and in the order in which averages were started on all ranks."""


class Method(Protocol):
    """A way to compress."""

    def average(self, number: int, flat: Tensor, parts: Sequence[Tensor]) -> Handle:
        """See `Compression.all_reduce`. `number`: from 0, the same in every round for the same gradients."""

    def traffic(self, calls: int, gradients: Sequence[Tensor]) -> list[Collective]:
        """See `Compression.traffic`."""


class Compression:
    """Averages gradients over the ranks of `group`, compressed.

    Args:
        kind: `bf16`, `int8` or `powersgd`.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup) -> None:
        methods: dict[str, type[Rounded | Int8 | PowerSGD]] = {"bf16": Rounded, "int8": Int8, "powersgd": PowerSGD}
        self._method: Method = methods[kind](group)
        self._group = group
        self._next_number = 0

    def begin_round(self) -> None:
        """The all-reduces of the next backward pass follow."""
        self._next_number = 0

    def all_reduce(self, gradient: Tensor, parts: Sequence[Tensor]) -> Handle:
        """Average `gradient` in place, when the handle is waited for.

        Args:
            parts: Views into it, one for each parameter.
        """
        self._next_number += 1
        return self._method.average(self._next_number - 1, gradient, parts)

    def register(self, ddp: DistributedDataParallel) -> None:
        """Let DDP reduce its buckets this way."""

        def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            if isinstance(self._method, Rounded):
                return bf16_compress_hook(self._group, bucket)
            flat = bucket.buffer()
            self._method.average(bucket.index(), flat, bucket.gradients()).wait()
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(flat)
            return done

        ddp.register_comm_hook(None, hook)

    def traffic(self, calls: int, gradients: Sequence[Tensor]) -> list[Collective]:
        """What replaces `calls` all-reduces of `gradients`. For `int8` and `powersgd`: once they have run."""
        return self._method.traffic(calls, gradients)


class Rounded:
    """Averages in bf16."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def average(self, number: int, flat: Tensor, parts: Sequence[Tensor]) -> "RoundedAllReduce":
        """See `Method`."""
        return RoundedAllReduce(flat, self._group)

    def traffic(self, calls: int, gradients: Sequence[Tensor]) -> list[Collective]:
        """See `Compression.traffic`."""
        payload = sum(2 * gradient.numel() for gradient in gradients)
        return [Collective("all_reduce", calls, payload, self._group.size(), "gradients")]


class RoundedAllReduce:
    """An all-reduce of a gradient's bf16 copy that has been started.

    PyTorch's hook asks the collective for its future, and with torch's `nccl` the compute stream then waits at once, by
    its source (docs/cuda.md). This asks for nothing before `wait`, so that backward goes on meanwhile.
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
