"""Data parallelism at its plainest: all-reduce each gradient after backward, at every micro-batch.

Every rank holds the whole model and computes gradients from its own samples. When backward is done, each gradient is
all-reduced, one after the other, and all ranks then take the same optimizer step. With P parameters and K
micro-batches a step, every rank puts K all-reduces of each gradient on the wire, 2(N-1)/N * K * P elements in all, and
nothing computes meanwhile: communication is fully exposed. This is the yardstick that all the others improve on.
"""

from dataclasses import replace

from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.replicated import ReplicatedStrategy, gradient_of


class SimpleDDP(ReplicatedStrategy):
    """Blocking all-reduces, one a parameter, after the backward pass of each micro-batch."""

    # A gradient that earlier micro-batches have been reduced into is the same on every rank, so the average leaves it
    # as it is and averages only what this micro-batch has added. A sum would count it once for each rank.
    always_averages = True
    supports = replace(ReplicatedStrategy.supports, experts=True)
    reduces_every_micro_batch = True  # `simple_ddp_ga` is the one that waits for the last

    @classmethod
    def in_stages(cls) -> type[ReplicatedStrategy]:
        return SimpleDDPInStages

    def after_backward(self) -> None:
        for parameter in self.trainable.values():
            self.all_reduce(gradient_of(parameter), group=self.group_of(parameter))

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces(list(self.trainable.values()) * micro_batches)


class SimpleDDPInStages(SimpleDDP):
    """In a pipeline, backward of a micro-batch has one or two passes for each stage of the rank. So gradients are
    reduced once, after the last pass of the step."""

    reduces_every_micro_batch = False

    def after_backward(self) -> None:
        pass

    def finish_gradient_synchronization(self) -> None:
        super().after_backward()

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return super().expected_gradient_traffic(1)
