"""All-reduces in bf16 (`--reduce-dtype bf16`): half of the bytes of fp32 gradients, with 8 bits of mantissa.

Each rank rounds its share, 1/N of its gradient, and sums are rounded too. So the result does not compare with
uncompressed training. DDP does this by PyTorch's own communication hook, and the result is bitwise the same.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.strategy.communication.collectives import Pending


class Bf16:
    """Averages gradients over the ranks of `group` in bf16. It has the interface of `communication.int8.Int8`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def begin_round(self) -> None:
        """Does nothing: no round depends on another."""

    def all_reduce(self, gradient: Tensor) -> Pending:
        """Start to average `gradient` in place; the handle's `wait` ends it.

        PyTorch's hook asks the collective for its future, and with torch's `nccl` the compute stream then waits at
        once, by its source (docs/status.md). This asks for nothing before `wait`, so that backward goes on meanwhile.
        """
        rounded = gradient.to(torch.bfloat16).div_(self._group.size())
        work = dist.all_reduce(rounded, group=self._group, async_op=True)
        return Pending([work], lambda: gradient.copy_(rounded))
