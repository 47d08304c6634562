"""ZeRO-2: as ZeRO-1, and a full gradient lives only until its bucket is reduced.

After the reduce-scatter a rank needs nothing but its shard of the sum, so the full bucket is freed. At rest gradients
then take P / N elements. At the peak there are three full buckets beside this shard: one fills, and two are being
reduced. Before a full bucket is copied together and sent, the older of the two is done, so there are never four.

With several micro-batches a step, each one is reduced and added to the shard. To wait for the last one would mean to
hold full gradients again. So K micro-batches send K reduce-scatters and one all-gather, (K + 1)(N-1)/N * P elements on
the wire. For K = 1 that is 2(N-1)/N * P, as in DDP. A stage of a pipeline does wait for the last one: its schedule has
other passes between.

Fp32 bytes a rank, beside activations: 4 P parameters, 4 P / N gradients, 8 P / N optimizer states (Rajbhandari et al.,
2020, "ZeRO", section 5.2).
"""

from sharding.parts.gradient_buckets import GradientBucket, ShardedGradientBucket
from sharding.zero1 import IN_FLIGHT, Zero1


class Zero2(Zero1):
    """Optimizer states and gradients are sharded."""

    shards = frozenset({"optimizer_state", "gradients"})
    make_bucket = ShardedGradientBucket
    reduces_every_micro_batch = True

    def prepare(self) -> None:
        super().prepare()
        self.reduces_every_micro_batch = not self.is_in_pipeline

    def start_reduction(self, bucket: GradientBucket) -> None:
        self.finish_earlier(IN_FLIGHT - 1)  # to free its memory first: gradients and their copy are here together
        bucket.start_reduction()
        self.in_flight.append(bucket)

    def after_backward(self) -> None:
        """Finish what the backward pass of a micro-batch has left in flight, so that its full gradients are freed."""
        if not self.steps.another_follows:
            return  # the end of the step does it
        if self.reduces_every_micro_batch:
            self.finish_gradient_synchronization()
            self.order.restart()
        for bucket in self.buckets:
            if bucket.casts:  # autograd would add the next gradients in the parameters' low precision
                bucket.collect()
