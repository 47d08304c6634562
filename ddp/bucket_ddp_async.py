"""Buckets: group gradients, and all-reduce a whole bucket as soon as its last gradient is ready, without waiting.

`simple_ddp_async` pays the latency of a collective once a parameter; `flat_ddp` pays it once, but hides nothing.
Buckets lie in between: each is a flat buffer that holds the gradients of neighbouring parameters, up to a size cap. The
traffic is that of all the others, 2(N-1)/N * P elements, in ceil(bytes / cap) or a few more all-reduces. A small cap
starts communication earlier and leaves less of it after backward; a large one has fewer latencies.

Three things make it correct and cheap:
- Buckets are assigned once, in reversed parameter order (about the order in which backward makes gradients), and
  all-reduced in that order on every rank. Ranks that use different parameters then still reduce the same things.
- A gradient lives in its bucket: `parameter.grad` is a view into it. The first micro-batch's gradient is moved there
  while it is still in cache, later ones are added in place, and the optimizer reads it there. So nothing is
  flattened, copied back or set to zero.
- Losses are weighted by their share of the global batch before backward, so the all-reduced sum is already the mean,
  and no pass divides it.

Which cap is best depends on the link. So by default (`--bucket-cap-mb auto`) the first steps are watched, the link is
measured, and the buckets are filled anew, once, in the order in which gradients really become ready (`ddp.link_fit`,
`ddp.bucket_plan`). Which sums are rounded together then depends on what was measured: with three ranks or more, two
runs differ in the last bits unless a cap is given. With `--overlap-optimizer`, the parameters of a bucket are updated
while later ones are still being reduced.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ddp.bucket_plan import describe, plan
from ddp.buckets import DEFAULT_CAP_MB, Bucket, fill_buckets
from ddp.link_fit import WATCHED_STEPS, LinkFit
from ddp.partial_step import only
from training.communication.traffic import Collective
from training.errors import UnsupportedError
from training.replicated import ReplicatedStrategy
from training.strategy import MicroBatch, are_finite
from training.watch.phases import phase


class BucketDDP(ReplicatedStrategy):
    """Non-blocking all-reduces, one a bucket, started during the last backward pass of a step."""

    overlaps_optimizer = True

    def prepare(self) -> None:
        super().prepare()
        parameters = list(self.trainable.values())
        self._fit: LinkFit | None = None
        cap_bytes = self.options.fixed_bucket_bytes or DEFAULT_CAP_MB * 2**20
        if self._is_fitted_to_link:
            self._fit = LinkFit(parameters, self.process_group, self.options.clock)
            self.settling_steps = WATCHED_STEPS + 1  # the fit comes in the one after
        self.buckets: list[Bucket] = []
        self._fill(fill_buckets(parameters, cap_bytes))
        self._updated: set[Tensor] = set()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient_ready)

    @property
    def _is_fitted_to_link(self) -> bool:
        """Not where gradients are compressed: what is timed are all-reduces of whole ones."""
        return self.options.fixed_bucket_bytes is None and self.options.compress is None

    def _fill(self, assignment: Sequence[list[nn.Parameter]]) -> None:
        self.buckets.clear()  # the memory of the old ones is free before the new ones take theirs
        self._place: dict[Tensor, tuple[Bucket, int]] = {}
        for parameters in assignment:
            bucket = Bucket(parameters)
            self.buckets.append(bucket)
            self._place.update({parameter: (bucket, slot) for slot, parameter in enumerate(parameters)})

    def before_step(self) -> None:
        super().before_step()
        if self._fit and self._fit.is_due:
            self._fit_buckets(self._fit)
            self._fit = None
        if self._fit:
            self._fit.begin_step()
        self._started = 0
        self._updated.clear()
        for bucket in self.buckets:
            bucket.reset()

    def _fit_buckets(self, fit: LinkFit) -> None:
        """Plan the buckets for what was measured, and fill them anew."""
        order, timeline = fit.timeline(self.options.overlap_optimizer)
        ends = plan(timeline)
        self.zero_grad()  # a gradient in an old bucket would keep its memory
        self._fill([order[start:end] for start, end in pairwise([0, *ends])])
        self.notes.append(describe(timeline, ends))

    def learned(self) -> list[list[str]] | None:
        """Names of the parameters in each bucket, once the buckets are fitted to the link."""
        if self._fit or not self._is_fitted_to_link:
            return None
        names = {parameter: name for name, parameter in self.trainable.items()}
        return [[names[parameter] for parameter in bucket.parameters] for bucket in self.buckets]

    def relearn(self, learned: list[list[str]] | None, first_step: Callable[[], Sequence[MicroBatch]]) -> None:
        """Take over the buckets, if they hold this model's parameters."""
        named = sorted(name for names in learned or () for name in names)
        if self._is_fitted_to_link and learned and all(learned) and named == sorted(self.trainable):
            self._fill([[self.trainable[name] for name in names] for names in learned])
            self._fit, self.settling_steps = None, 0
            self.notes.append(f"{len(learned)} buckets, fitted to the link in the run that saved the checkpoint")

    def _on_gradient_ready(self, parameter: Tensor) -> None:
        bucket, slot = self._place[parameter]
        if bucket.is_started:
            raise RuntimeError("a parameter received a second gradient while its bucket was being reduced")
        bucket.place_gradient(slot)
        if not self.synchronizes_gradients:
            return
        bucket.missing -= 1
        if self._fit:
            self._fit.on_gradient(parameter)
            return
        while self._started < len(self.buckets) and self.buckets[self._started].missing == 0:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self.buckets[self._started]
        bucket.complete()
        bucket.work = self.all_reduce(bucket.flat, bucket.views, async_op=True)
        bucket.is_started = True
        self._started += 1

    def finish_gradient_synchronization(self) -> None:
        while self._started < len(self.buckets):  # those that wait for a gradient that backward did not make
            self._start_next()
        received = {p for p, got in zip(self.trainable.values(), self.watch.received(), strict=True) if got}
        # While later buckets are under way, there is time for what would otherwise follow the last.
        self._sums: list[Tensor] = []
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            if self._updates_early:
                self._update(bucket, received)
            else:
                self._sums.append(self._share_of(bucket.flat).sum(dtype=torch.float32))

    def _share_of(self, flat: Tensor) -> Tensor:
        """The part of a bucket that this rank looks at for all."""
        rank, size = self.data_parallel_rank, self.data_parallel_size
        return flat[len(flat) * rank // size : len(flat) * (rank + 1) // size]

    def share_is_finite(self) -> bool:
        return are_finite(self._sums)

    # The optimizer, bucket by bucket -----------------------------------------------------------------------------

    @property
    def _updates_early(self) -> bool:
        """Whether this step's parameters are updated as soon as their bucket is reduced."""
        return self.options.overlap_optimizer and self._fit is None and not self.watch.inspects

    def _update(self, bucket: Bucket, received: set[nn.Parameter]) -> None:
        """Update the parameters of a reduced bucket, while later ones are under way.

        Only those that got a gradient on this rank: of the others nobody knows yet whether any rank used them. Nothing
        after a bucket that is not finite, which ends the run.
        """
        self._sums.append(bucket.flat.sum(dtype=torch.float32))
        if are_finite(self._sums):
            ready = [parameter for parameter in bucket.parameters if parameter in received]
            with phase("optimizer"), only(self.optimizer, ready):
                self.optimizer.step()
            self._updated.update(ready)

    def step(self) -> None:
        if self._updated:
            with only(self.optimizer, [p for p in self.trainable.values() if p not in self._updated]):
                super().step()
        elif self._fit:
            self._fit.time_update(super().step)
        else:
            super().step()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        if self.options.overlap_optimizer:
            raise UnsupportedError("gradients cannot be clipped when parameters are updated before all are reduced")
        return super().clip_grad_norm_(max_norm)

    # What a run wants to know -----------------------------------------------------------------------------------

    def gradient_tensors(self) -> Iterable[Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces(len(self.buckets), self.trainable.values())
