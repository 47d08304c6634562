"""All-reduce a gradient as soon as it is ready, without waiting: communication hides behind backward.

As in `simple_ddp_hook`, a hook on each parameter starts the all-reduce of its gradient, in one fixed order on all
ranks. But the hook returns at once. Backward goes on to the next layer while the gradient travels, and the optimizer
waits for all that is still in flight. The traffic is the same, 2(N-1)/N * P elements; what changes is how much of it is
exposed: at best only the all-reduce of the last gradient. Each small all-reduce still pays a latency, which
`bucket_ddp_async` saves.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.fixed_order import FixedOrder
from ddp_lab.strategy.communication.traffic import Collective
from ddp_lab.strategy.replicated import ReplicatedStrategy


class AsyncDDP(ReplicatedStrategy):
    """Non-blocking all-reduces, one a parameter, started during the last backward pass of a step."""

    reduces_in_backward = True

    def prepare(self) -> None:
        super().prepare()
        self._order: FixedOrder[Tensor] = FixedOrder(reversed(self.trainable.values()))
        self._in_flight: list[dist.Work] = []
        for parameter in self.trainable.values():
            parameter.register_post_accumulate_grad_hook(self._on_gradient_ready)

    def before_step(self) -> None:
        super().before_step()
        self._order.restart()

    def _on_gradient_ready(self, parameter: Tensor) -> None:
        if self.synchronizes_gradients:
            for next_parameter in self._order.ready(parameter):
                self._start(next_parameter)

    def _start(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self._in_flight.append(self.all_reduce(parameter.grad, async_op=True))

    def finish_gradient_synchronization(self) -> None:
        for parameter in self._order.rest():  # behind a gradient that backward did not make on this rank
            self._start(parameter)
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces(len(self.trainable), self.trainable.values())
