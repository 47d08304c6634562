"""All-reduce each gradient in the hook that autograd runs when the gradient is ready, and wait for it there.

Backward makes gradients one by one, from the last layer to the first. A hook on each parameter can therefore reduce
its gradient before the earlier layers have theirs. Here the hook waits for the all-reduce, so backward stands still
meanwhile. The traffic is that of `simple_ddp_ga`: 2(N-1)/N * P elements, one all-reduce a parameter. Nothing is hidden.
`simple_ddp_async` differs only in that it does not wait.

Hooks may fire in another order on another rank. So all ranks reduce in one fixed order: reversed parameter order, which
is roughly the order of backward. A gradient that backward does not make on this rank is reduced as zeros.
"""

from functools import partial

from torch import Tensor

from ddp.fixed_order import FixedOrder
from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.replicated import ReplicatedStrategy, gradient_of


class HookDDP(ReplicatedStrategy):
    """Blocking all-reduces, one a parameter, during the last backward pass of a step."""

    reduces_in_backward = True

    def prepare(self) -> None:
        super().prepare()
        self._order: FixedOrder[Tensor] = FixedOrder(reversed(self.trainable.values()))
        for parameter in self.trainable.values():
            self.watch.on_arrival([parameter], partial(self._on_gradient_ready, parameter), at=[parameter])

    def before_step(self) -> None:
        super().before_step()
        self._order.restart()

    def _on_gradient_ready(self, parameter: Tensor, *_: object) -> None:
        if self.steps.reduces_now:
            for next_parameter in self._order.ready(parameter):
                self._reduce(gradient_of(next_parameter))

    def _reduce(self, gradient: Tensor) -> None:
        self.all_reduce(gradient)

    def finish_gradient_synchronization(self) -> None:
        for parameter in self._order.release_all():  # after a gradient that backward did not make on this rank
            self._reduce(gradient_of(parameter))

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces(self.trainable.values())
