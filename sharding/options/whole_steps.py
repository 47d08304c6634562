"""ZeRO-3 in a stage of a pipeline: parameters are whole for a step, and sharded between steps.

A schedule runs many forward and backward passes of one stage in an order of its own. To gather a unit for each of them
would send all parameters twice a micro-batch, and the next stage would wait for it. So a stage is gathered once a
step, before its first forward pass, and freed after its last backward pass. In between it is ZeRO-2, whose gradients
are reduced once.

What is sent: one all-gather and one reduce-scatter of the stage's parameters a step, as in ZeRO-1.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ddp_lab.strategy.account import Collective
from sharding.parts.flat import FlatParameters
from sharding.parts.unit import ShardedParameters
from sharding.zero2 import Zero2


class Zero3InStages(Zero2):
    """Optimizer states, gradients and parameters are sharded; parameters between steps."""

    shards = frozenset({"optimizer_state", "gradients", "parameters"})
    make_flat = ShardedParameters

    def prepare(self) -> None:
        super().prepare()
        self._is_whole = False
        for flat in self.flats:
            flat.forget = self._reshard  # type: ignore[attr-defined]

    def before_step(self) -> None:
        super().before_step()
        self._unshard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        self._unshard()
        try:
            yield
        finally:
            self._reshard()

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        self._reshard()

    def abandon_step(self) -> None:
        super().abandon_step()
        self._reshard()

    def publish(self, flat: FlatParameters) -> None:
        flat.shard_has_changed()

    def _unshard(self) -> None:
        if not self._is_whole:
            self._is_whole = True
            gathers = [flat.unshard() for flat in self.flats]  # type: ignore[attr-defined]
            for flat, pending in zip(self.flats, gathers, strict=True):
                pending.wait()
                flat.use_full()  # type: ignore[attr-defined]

    def _reshard(self) -> None:
        if self._is_whole:
            self._is_whole = False
            for flat in self.flats:
                flat.reshard()  # type: ignore[attr-defined]

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.traffic_of(self.flats, self.buckets)
