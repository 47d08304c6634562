"""All-reduces in bf16 (`--reduce-dtype bf16`): half of the bytes of fp32 gradients, with 8 bits of mantissa.

Each rank rounds its share, 1/N of its gradient, and sums are rounded too. So the result does not compare with
uncompressed training. DDP does this by PyTorch's own communication hook, and the result is bitwise the same.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.strategy.account import Collective


class Bf16:
    """Averages gradients over the ranks of `group` in bf16. It has the interface of `communication.int8.Int8`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def begin_round(self) -> None:
        """Does nothing: no round depends on another."""

    def all_reduce(self, gradient: Tensor) -> "Bf16AllReduce":
        """Start to average `gradient` in place; the handle's `wait` ends it."""
        return Bf16AllReduce(gradient, self._group)

    def traffic(self, calls: int, gradients: Sequence[Tensor]) -> list[Collective]:
        """What replaces `calls` all-reduces of `gradients`."""
        payload = sum(2 * gradient.numel() for gradient in gradients)
        return [Collective("all_reduce", calls, payload, self._group.size(), "gradients")]


class Bf16AllReduce:
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
