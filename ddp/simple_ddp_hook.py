"""All-reduce a gradient in the hook that autograd runs when it is ready, and wait for it there.

Backward makes gradients one by one, from the last layer to the first. A hook on each parameter can therefore reduce
its gradient while later ones do not exist yet. Here the hook waits for the all-reduce, so backward stands still
meanwhile: the traffic is that of `simple_ddp_ga`, 2(N-1)/N * P elements in one all-reduce a parameter, and nothing is
hidden. It is the step between `simple_ddp_ga` and `simple_ddp_async`, which differs from it by not waiting.

The order of collectives must be the same on every rank, and the order in which hooks fire need not be: ranks may use
different parameters. So gradients are reduced in one fixed order, reversed parameter order, which is roughly the order
of backward. A gradient that is ready early waits for those before it; what backward never made is reduced as zeros.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from training.communication.traffic import Collective
from training.replicated import ReplicatedStrategy


class HookDDP(ReplicatedStrategy):
    """Blocking all-reduces, one a parameter, during the last backward pass of a step."""

    def prepare(self) -> None:
        super().prepare()
        self._order = list(reversed(self.trainable.values()))
        self._ready = [False] * len(self._order)
        self._next = 0
        for index, parameter in enumerate(self._order):
            parameter.register_post_accumulate_grad_hook(self._on_gradient_ready(index))

    def before_step(self) -> None:
        super().before_step()
        self._ready = [False] * len(self._order)
        self._next = 0

    def _on_gradient_ready(self, index: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if not self.synchronizes_gradients:
                return
            if index < self._next:
                raise RuntimeError("a parameter received a second gradient after its first was reduced")
            self._ready[index] = True
            while self._next < len(self._order) and self._ready[self._next]:
                self._reduce_next()

        return hook

    def _reduce_next(self) -> None:
        parameter = self._order[self._next]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self.all_reduce(parameter.grad)
        self._next += 1

    def finish_gradient_synchronization(self) -> None:
        while self._next < len(self._order):
            self._reduce_next()

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces(len(self.trainable), self.trainable.values())
