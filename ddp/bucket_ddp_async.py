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
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ddp.bucket_plan import describe, plan
from ddp.link_fit import LinkFit
from ddp.partial_step import only
from training.config import AUTO
from training.errors import UnsupportedError
from training.replicated import ReplicatedStrategy, bytes_of
from training.strategy import are_finite
from training.traffic import Collective

DEFAULT_CAP_MB = 25.0
WATCHED_BUCKETS = 8
"""About so many buckets are in use while the link is being measured."""


class Bucket:
    """A flat buffer of gradients that are all-reduced together.

    Args:
        parameters: Of one dtype and device; their gradients lie in the buffer in this order.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        pieces = self.flat.split([p.numel() for p in parameters])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.missing = len(parameters)
        self.is_started = False
        self.work: Any = None

    def place_gradient(self, slot: int) -> None:
        """Make `.grad` of the parameter in `slot` the view into this bucket, with the same values."""
        parameter, view = self.parameters[slot], self.views[slot]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def complete(self) -> None:
        """Make sure that every gradient lies in the buffer."""
        for slot in range(len(self.parameters)):
            if self.parameters[slot].grad is not self.views[slot]:  # not used on this rank in this step
                self.place_gradient(slot)

    def reset(self) -> None:
        """Await the gradients of the next step."""
        self.missing = len(self.parameters)
        self.is_started = False
        self.work = None


def fill_buckets(parameters: Iterable[nn.Parameter], cap_bytes: float) -> list[list[nn.Parameter]]:
    """Fill buckets with `parameters` in reversed order, a new one where dtype changes or `cap_bytes` would be passed.

    A parameter larger than `cap_bytes` gets a bucket of its own.
    """
    buckets: list[list[nn.Parameter]] = []
    for parameter in reversed(list(parameters)):
        fits = buckets and buckets[-1][0].dtype == parameter.dtype and buckets[-1][0].device == parameter.device
        if fits and bytes_of(buckets[-1]) + bytes_of([parameter]) <= cap_bytes:
            buckets[-1].append(parameter)
        else:
            buckets.append([parameter])
    return buckets


class BucketDDP(ReplicatedStrategy):
    """Non-blocking all-reduces, one a bucket, started during the last backward pass of a step."""

    overlaps_optimizer = True

    def prepare(self) -> None:
        super().prepare()
        parameters = list(self.trainable.values())
        self._updated: set[nn.Parameter] = set()
        self._fit: LinkFit | None = None
        cap_bytes = self.options.fixed_bucket_bytes or DEFAULT_CAP_MB * 2**20
        if self.options.bucket_cap_mb == AUTO:
            self._fit = LinkFit(parameters, self.process_group, self.options.clock)
            cap_bytes = bytes_of(parameters) / WATCHED_BUCKETS
        self.buckets: list[Bucket] = []
        self._fill(fill_buckets(parameters, cap_bytes))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient_ready)

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
        self._started = 0
        for bucket in self.buckets:
            bucket.reset()
        if self._fit:
            self._fit.begin_step()

    def _fit_buckets(self, fit: LinkFit) -> None:
        """Plan the buckets for what was measured, and fill them anew."""
        order, timeline = fit.timeline([bucket.parameters for bucket in self.buckets])
        ends = plan(timeline)
        self.zero_grad()  # a gradient in an old bucket would keep its memory
        self._fill([order[start:end] for start, end in pairwise([0, *ends])])
        self.remarks.append(describe(timeline, ends))

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
            if self._fit.defers:
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
        self._updated.clear()
        self._updates_early = self.options.overlap_optimizer and not self.watch.inspects
        self._all_finite = True
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            if self._updates_early:
                with record_function("optimizer"):
                    self._update(bucket)

    # The optimizer, bucket by bucket ------------------------------------------------------------------------------

    def _update(self, bucket: Bucket) -> None:
        """Update the parameters of a reduced bucket, while later ones are under way.

        Only those that got a gradient on this rank: of the others nobody knows yet whether any rank used them. Nothing
        after a bucket that is not finite, which ends the run.
        """
        self._all_finite = self._all_finite and are_finite([bucket.flat])
        if self._all_finite:
            received = dict(zip(self.trainable.values(), self.watch.received(), strict=True))
            ready = [parameter for parameter in bucket.parameters if received[parameter]]
            with only(self.optimizer, ready):
                self.optimizer.step()
            self._updated.update(ready)

    def share_is_finite(self) -> bool:
        return self._all_finite if self._updates_early else super().share_is_finite()

    def step(self) -> None:
        if not self._updated:
            super().step()
            return
        with only(self.optimizer, [p for p in self.trainable.values() if p not in self._updated]):
            super().step()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        if self.options.overlap_optimizer:
            raise UnsupportedError("gradients cannot be clipped when parameters are updated before all are reduced")
        return super().clip_grad_norm_(max_norm)

    # What a run wants to know -------------------------------------------------------------------------------------

    def gradient_tensors(self) -> Iterable[Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces(len(self.buckets), self.trainable.values())
