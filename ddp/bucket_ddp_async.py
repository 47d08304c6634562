"""Buckets: group gradients, and all-reduce a whole bucket as soon as its last gradient is ready, without waiting.

`simple_ddp_async` pays the latency of a collective once a parameter. `flat_ddp` pays it once, but hides nothing.
Buckets lie between the two: each is a flat buffer for the gradients of neighbouring parameters, up to a size cap. The
traffic is that of all the others, 2(N-1)/N * P elements, in about ceil(bytes / cap) all-reduces. A small cap starts
communication earlier and leaves less of it after backward; a large cap pays fewer latencies.

Three things make it correct and cheap:
- Buckets are assigned once, in reversed parameter order (roughly the order of backward), and all-reduced in that order
  on every rank. So ranks that use different parameters still reduce the same buckets.
- A gradient lives in its bucket: `parameter.grad` is a view into it. In the first micro-batch a large gradient is
  copied at once and small gradients are copied together, so that hardly any takes memory twice. Later micro-batches
  add in place, and the optimizer reads the views. The first gradient allocates the bucket, `zero_grad` frees it.
- Losses are weighted by their share of the global batch before backward. So the all-reduced sum is the mean already.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ddp.buckets import Bucket, fill_buckets, usual_cap_bytes
from ddp.fixed_order import FixedOrder
from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.capabilities import Supports
from ddp_lab.strategy.replicated import ReplicatedStrategy


class BucketDDP(ReplicatedStrategy):
    """Non-blocking all-reduces, one a bucket, started during the last backward pass of a step."""

    supports = Supports(compress=True, experts=True)
    reduces_in_backward = True

    def prepare(self) -> None:
        super().prepare()
        cap_bytes = self.options.fixed_bucket_bytes or usual_cap_bytes(self.trainable.values())
        is_one = self.is_in_pipeline and self.group_size == 1  # no other rank has the stage
        filled = fill_buckets(self.trainable.values(), cap_bytes, self.group_of)
        self.buckets = [] if is_one else [Bucket(parameters) for parameters in filled]
        self._order = FixedOrder(self.buckets)
        for bucket in self.buckets:
            self.watch.on_arrival(bucket.parameters, partial(self._on_gradients, bucket), at=bucket.moves_at)

    def before_step(self) -> None:
        super().before_step()
        self._norms = list[Tensor]()  # of this rank's share of each bucket
        self._order.restart()
        for bucket in self.buckets:
            bucket.reset()

    def before_micro_batch(self) -> None:
        super().before_micro_batch()
        for bucket in self.buckets if not self.is_in_pipeline else ():
            bucket.missing = len(bucket.parameters)

    def _on_gradients(self, bucket: Bucket, count: int, trigger: Tensor | None) -> bool:
        bucket.missing -= count * self.steps.counts_gradients
        if trigger in bucket.moves_at:
            bucket.collect()
        if self.steps.reduces_now and not bucket.missing:
            for next_bucket in self._order.ready(bucket):
                self._start(next_bucket)
        return not bucket.missing

    def after_backward(self) -> None:
        if self.steps.another_follows:
            for bucket in self.buckets:
                bucket.collect()

    def _start(self, bucket: Bucket) -> None:
        bucket.complete()
        group = self.group_of(bucket.parameters[0])
        bucket.work = self.all_reduce(bucket.flat, async_op=True, group=group)

    def finish_gradient_synchronization(self) -> None:
        for bucket in self._order.release_all():  # those with a gradient that backward did not make on this rank
            self._start(bucket)
        rank, size = self.group_rank, self.group_size
        for bucket in self.buckets:  # while the later ones are in flight
            bucket.wait()
            numel = len(bucket.flat)
            self._norms.append(vector_norm(bucket.flat[numel * rank // size : numel * (rank + 1) // size]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for bucket in self.buckets:
            bucket.reset()

    def norm_of_share(self) -> Tensor:
        if self.model_parallel is not None:
            return super().norm_of_share()
        return vector_norm(torch.stack(self._norms), dtype=torch.float64)

    def gradient_tensors(self) -> Iterable[Tensor]:
        return [bucket.flat for bucket in self.buckets] or super().gradient_tensors()

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces(self.trainable.values(), [bucket.parameters[0] for bucket in self.buckets])
