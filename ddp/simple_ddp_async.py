"""All-reduce a gradient as soon as it is ready, without waiting: communication hides behind backward.

As in `simple_ddp_hook`, a hook on each parameter starts the all-reduce of its gradient. But the hook returns at once;
backward goes on to the next layer while the gradient travels, and the optimizer waits for all that is still in flight.
The traffic is the same, 2(N-1)/N * P elements; what changes is how much of it anybody has to wait for: at best only the
last parameter's. Small all-reduces pay a latency each, which `bucket_ddp_async` saves.

As in `simple_ddp_hook`, all ranks reduce in one fixed order, reversed parameter order.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from training.communication.traffic import Collective
from training.replicated import ReplicatedStrategy


class AsyncDDP(ReplicatedStrategy):
    """Non-blocking all-reduces, one a parameter, started during the last backward pass of a step."""

    def prepare(self) -> None:
        super().prepare()
        self._order = list(reversed(self.trainable.values()))
        self._ready = [False] * len(self._order)
        self._in_flight: list[dist.Work] = []
        for index, parameter in enumerate(self._order):
            parameter.register_post_accumulate_grad_hook(self._on_gradient_ready(index))

    def before_step(self) -> None:
        super().before_step()
        self._ready = [False] * len(self._order)

    def _on_gradient_ready(self, index: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if not self.synchronizes_gradients:
                return
            if index < len(self._in_flight):
                raise RuntimeError("a parameter received a second gradient while its first was being reduced")
            self._ready[index] = True
            while len(self._in_flight) < len(self._order) and self._ready[len(self._in_flight)]:
                self._start_next()

        return hook

    def _start_next(self) -> None:
        parameter = self._order[len(self._in_flight)]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self._in_flight.append(self.all_reduce(parameter.grad, async_op=True))

    def finish_gradient_synchronization(self) -> None:
        while len(self._in_flight) < len(self._order):  # the ones that backward did not reach on this rank
            self._start_next()
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces(len(self.trainable), self.trainable.values())
