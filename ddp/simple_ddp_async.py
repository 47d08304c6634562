"""All-reduce a gradient as soon as it is ready, without waiting: communication hides behind backward.

As in `simple_ddp_hook`, a hook on each parameter starts the all-reduce of its gradient, in one fixed order on all
ranks. But the hook returns at once. Backward goes on to the next layer while the gradient travels, and the optimizer
waits for all that is still in flight. The traffic is the same, 2(N-1)/N * P elements; what changes is how much of it is
exposed: at best only the all-reduce of the last gradient. Each small all-reduce still pays a latency, which
`bucket_ddp_async` saves.
"""

import torch.distributed as dist
from torch import Tensor

from ddp.simple_ddp_hook import HookDDP


class AsyncDDP(HookDDP):
    """Non-blocking all-reduces, one a parameter, started during the last backward pass of a step."""

    def prepare(self) -> None:
        super().prepare()
        self._in_flight: list[dist.Work] = []

    def _reduce(self, gradient: Tensor) -> None:
        self._in_flight.append(self.all_reduce(gradient, async_op=True))

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()
