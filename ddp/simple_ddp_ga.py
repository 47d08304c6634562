"""Simple data parallelism with gradient accumulation: all-reduce each gradient on the last micro-batch only.

The sum over micro-batches and the sum over ranks commute. So each rank adds up the gradients of its K micro-batches by
itself, and they are all-reduced once, after the last backward. Per optimizer step that is
2(N-1)/N * P elements on the wire instead of K times as many; what is left is as exposed as in `simple_ddp`.
"""

from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.replicated import ReplicatedStrategy, gradient_of


class SimpleDDPAccumulated(ReplicatedStrategy):
    """Blocking all-reduces, one a parameter, after the last backward pass of a step."""

    def after_backward(self) -> None:
        if not self.steps.reduces_now:
            return
        for parameter in self.trainable.values():
            self.all_reduce(gradient_of(parameter))

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces(self.trainable.values())
