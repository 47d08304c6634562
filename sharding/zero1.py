"""ZeRO-1: every rank computes with the whole model, but keeps optimizer states only for its shard of it.

Adam holds two numbers for each parameter, so replicated training keeps N copies of the largest part of its memory. Here
each rank updates 1/N of the elements and nothing else, and it needs the summed gradient only there. An all-reduce is a
reduce-scatter followed by an all-gather, and the optimizer fits between the two:
- In backward, gradients lie in buckets. A bucket's reduce-scatter starts as soon as its last gradient is ready, while
  backward goes on.
- After backward, each rank updates its shard of the parameters with its shard of the gradients.
- Then the updated parameters are all-gathered, bucket by bucket, while the next forward pass begins. Each part of the
  model waits only for its own parameters (`sharding.options.arrivals`).

On the wire that is 2(N-1)/N * P elements, as much as DDP. Fp32 bytes a rank, beside activations: 4 P parameters, 4 P
gradients, 8 P / N optimizer states (Rajbhandari et al., 2020, "ZeRO", section 5.1).
"""

from functools import partial

import torch
from torch import Tensor

from ddp.buckets import fill_buckets, usual_cap_bytes
from ddp.fixed_order import FixedOrder
from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.communication.collectives import all_gather
from ddp_lab.strategy.groups import is_gloo, side_group
from ddp_lab.strategy.modules import find_blocks
from sharding.options.arrivals import Arrivals
from sharding.parts.flat import FlatParameters
from sharding.parts.gradient_buckets import GradientBucket
from sharding.parts.plan import segments
from sharding.parts.sharded import ShardedStrategy

IN_FLIGHT = 2
"""Buckets that are reduced while one fills, where a rank waits for them in backward. With a single one, the link and
backward would wait for each other."""


class Zero1(ShardedStrategy):
    """Optimizer states are sharded."""

    shards = frozenset({"optimizer_state"})
    make_bucket: type[GradientBucket] = GradientBucket
    make_flat = FlatParameters
    reduces_in_backward = True

    def prepare(self) -> None:
        super().prepare()
        # buckets of neighbouring parameters, in the order in which backward makes their gradients
        cap_bytes = self.options.fixed_bucket_bytes or usual_cap_bytes(self.trainable.values())
        self.flats = [
            self.make_flat(parameters, self.groups_of(parameters[0]), self.placement)
            for segment in segments(self.module, with_frozen="parameters" in self.saves_shards_of)
            for parameters in fill_buckets(segment, cap_bytes, self.group_of)
        ]
        self.buckets = [self.make_bucket(flat, self.placement.reduce_dtype) for flat in self.flats if flat.trainable]
        self.broadcast_plain_tensors()
        if self.buffers() and self.groups.shard is self.process_group:  # or forward would wait for all parameters
            self.group_of_buffers = side_group(self.process_group, self.device)
        self.order = FixedOrder(self.buckets)
        self.arrivals = Arrivals(self.module, find_blocks(self.module), self.flats)
        for bucket in self.buckets:
            self.watch.on_arrival(bucket.flat.parameters, partial(self._on_gradients, bucket), at=bucket.moves_at)

    # Backward: reduce-scatter gradients --------------------------------------------------------------------------

    def before_step(self) -> None:
        super().before_step()
        self.order.restart()
        self.in_flight: list[GradientBucket] = []  # that are being reduced, oldest first
        for flat in self.flats:
            flat.require_in_place()

    def _on_gradients(self, bucket: GradientBucket, count: int, trigger: Tensor | None) -> bool:
        if not self.steps.in_micro_batch:
            return False
        bucket.missing -= count * self.steps.counts_gradients
        if self.steps.reduces_now and not bucket.missing:
            for next_bucket in self.order.ready(bucket):
                self.start_reduction(next_bucket)
        elif trigger in bucket.moves_at:
            bucket.collect()
        return not bucket.missing

    def after_backward(self) -> None:
        if self.steps.another_follows:
            for bucket in self.buckets:
                bucket.collect()

    def start_reduction(self, bucket: GradientBucket) -> None:
        bucket.start_reduction()
        self.in_flight.append(bucket)
        # The sum over replicas should start in backward, too. What Gloo has received takes memory until it is added.
        if self.groups.replicate or is_gloo(self.groups.shard, self.device):
            self.finish_earlier(IN_FLIGHT)

    def finish_earlier(self, max_buckets: int) -> None:
        """Wait until at most `max_buckets` reductions are in flight."""
        while len(self.in_flight) > max_buckets:
            self.in_flight.pop(0).finish_reduction()

    def finish_gradient_synchronization(self) -> None:
        for bucket in self.order.release_all():  # those with a gradient that backward did not make on this rank
            self.start_reduction(bucket)
        self.finish_earlier(0)
        self.take_gradients()

    # Optimizer: update the shard, then all-gather parameters -----------------------------------------------------

    def publish(self, flat: FlatParameters) -> None:
        flat.fill_own_part()
        torch.autograd.graph.increment_version(flat.parameters)  # a graph that has saved them can run no more
        self.arrivals.start(flat, all_gather(flat.full, flat.group))

    def finish_parameter_synchronization(self) -> None:
        self.arrivals.wait()

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        times = micro_batches if self.reduces_every_micro_batch else 1
        return self.traffic_of([bucket.flat for bucket in self.buckets], [*self.buckets] * times)
