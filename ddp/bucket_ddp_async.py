"""Buckets: group gradients, and all-reduce a whole bucket as soon as its last gradient is ready, without waiting.

`simple_ddp_async` pays the latency of a collective once a parameter. `flat_ddp` pays it once, but hides nothing.
Buckets lie between the two: each is a flat buffer for the gradients of neighbouring parameters, up to a size cap. The
traffic is that of all the others, 2(N-1)/N * P elements, in about ceil(bytes / cap) all-reduces. A small cap starts
communication earlier and leaves less of it after backward; a large cap pays fewer latencies.

Three things make it correct and cheap:
- Buckets are assigned once, in reversed parameter order (roughly the order of backward), and all-reduced in that order
  on every rank. So ranks that use different parameters still reduce the same buckets.
- A gradient lives in its bucket: `parameter.grad` is a view into it. The first micro-batch's gradient is copied there
  while it is still in cache, later ones are added in place, and the optimizer reads it there.
- Losses are weighted by their share of the global batch before backward. So the all-reduced sum is the mean already.

The best cap depends on the link. With `--bucket-cap-mb auto` the first steps decide it (`ddp.fitted_buckets`). With
`--overlap-optimizer` a bucket's parameters are updated while later buckets are in flight (`ddp.early_updates`).
"""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from ddp.buckets import DEFAULT_CAP_MB, Bucket, fill_buckets
from ddp.early_updates import EarlyUpdates
from ddp.fitted_buckets import FittedBuckets
from ddp.fixed_order import FixedOrder
from ddp_lab.strategy.communication.traffic import Collective
from ddp_lab.strategy.interface import MicroBatch
from ddp_lab.strategy.replicated import ReplicatedStrategy


class BucketDDP(ReplicatedStrategy):
    """Non-blocking all-reduces, one a bucket, started during the last backward pass of a step."""

    overlaps_optimizer = reduces_in_backward = True

    def prepare(self) -> None:
        super().prepare()
        self.fitted = FittedBuckets(self.trainable, self.process_group, self.options)
        self.deciding_steps = self.fitted.settling_steps
        self.early = EarlyUpdates(self)
        cap_bytes = self.options.fixed_bucket_bytes or DEFAULT_CAP_MB * 2**20
        self._fill(fill_buckets(self.trainable.values(), cap_bytes))
        for parameter in self.trainable.values():
            parameter.register_post_accumulate_grad_hook(self._on_gradient_ready)

    def _fill(self, assignment: Sequence[list[nn.Parameter]]) -> None:
        self.buckets: list[Bucket] = []
        self._place: dict[Tensor, tuple[Bucket, int]] = {}
        self._order = FixedOrder(self.buckets)  # so the old buckets' memory is free before the new ones take theirs
        self.buckets = [Bucket(parameters) for parameters in assignment]
        self._order = FixedOrder(self.buckets)
        self._place = {p: (bucket, slot) for bucket in self.buckets for slot, p in enumerate(bucket.parameters)}

    def before_step(self) -> None:
        super().before_step()
        if assignment := self.fitted.begin_step():
            self.zero_grad()  # a gradient in an old bucket would keep its memory
            self._fill(assignment)
            self.notes.append(self.fitted.note)
        self.early.begin_step()
        self._order.restart()
        for bucket in self.buckets:
            bucket.reset()

    def _on_gradient_ready(self, parameter: Tensor) -> None:
        bucket, slot = self._place[parameter]
        bucket.place_gradient(slot)
        if not self.synchronizes_gradients:
            return
        bucket.missing -= 1
        if self.fitted.is_watching:
            self.fitted.on_gradient(parameter)
        elif bucket.missing == 0:
            for next_bucket in self._order.ready(bucket):
                self._start(next_bucket)

    def _start(self, bucket: Bucket) -> None:
        bucket.complete()
        bucket.work = self.all_reduce(bucket.flat, bucket.views, async_op=True)

    def finish_gradient_synchronization(self) -> None:
        for bucket in self._order.rest():  # behind a gradient that backward did not make on this rank
            self._start(bucket)
        updates_early = self.options.overlap_optimizer and not (self.fitted.is_watching or self.watch.inspects)
        for bucket in self.buckets:  # while the later ones are in flight
            bucket.wait()
            self.early.check_and_update(bucket) if updates_early else self.early.check(bucket)

    def norm_of_share(self) -> Tensor:
        return self.early.norm() if self.model_parallel is None else super().norm_of_share()

    def update(self) -> None:
        with self.early.rest():
            self.fitted.time_update(super().update)

    def learned(self) -> list[list[str]] | None:
        return self.fitted.names([bucket.parameters for bucket in self.buckets])

    def relearn(self, learned: list[list[str]] | None, first_step: Callable[[], Sequence[MicroBatch]]) -> None:
        if assignment := self.fitted.from_names(learned):
            self._fill(assignment)
            self.deciding_steps = 0
            self.notes.append(self.fitted.note)

    def gradient_tensors(self) -> Iterable[Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces(len(self.buckets), self.trainable.values())
