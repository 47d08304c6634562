"""ZeRO-1: every rank computes with the whole model, but keeps optimizer states only for its shard of it.

Adam holds two numbers for each parameter, so replicated training keeps N copies of the largest part of its memory. Here
each rank updates 1/N of the elements and nothing else. It needs the summed gradient only there: an all-reduce is a
reduce-scatter and an all-gather, and the optimizer fits between the two. So gradients are reduce-scattered, the shards
are updated, and the updated parameters are all-gathered: 2(N-1)/N * P elements on the wire, as much as DDP.

What hides the communication: gradients lie in buckets, and a bucket's reduce-scatter starts as soon as its last
gradient is ready, while backward goes on. Parameters are gathered bucket by bucket, and each part of the next forward
pass waits only for those that it needs.

Fp32 bytes a rank, beside activations: 4 P parameters, 4 P gradients, 8 P / N optimizer states (Rajbhandari et al.,
2020, "ZeRO", section 5.1).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ddp.buckets import DEFAULT_CAP_MB, fill_buckets
from sharding.arrivals import Arrivals
from sharding.collectives import Pending, all_gather, expected_all_gathers, expected_reduce_scatters, reduce_scatter
from sharding.flat import FlatParameters
from sharding.sharded import ShardedStrategy
from sharding.units import around_units, find_blocks, plan_units
from training.communication.traffic import Collective
from training.replicated import broadcast_from_rank0, buffer_broadcasts, bytes_of


class GradientBucket:
    """The gradients of some flat parameters, in a flat tensor that stays. The sum's shard replaces this rank's part.

    Attributes:
        full: This rank's own gradients, (padded_numel,).
        shard: The sum over ranks, (shard_numel,), once reduced.
        missing: Gradients still to come before the bucket can be reduced.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self.flat = flat
        self.allocate()
        self.in_flight: Pending | None = None
        self.forget()

    def allocate(self) -> None:
        self.full = torch.zeros_like(self.flat.full)
        self.views = [self.flat.layout.view(self.full, slot) for slot in range(len(self.flat.parameters))]

    def forget(self) -> None:
        """Await the gradients of the next step."""
        if self.in_flight:  # of a step that was abandoned, and may go on writing
            self.allocate()
        self.shard: Tensor | None = None
        self.in_flight = None
        self.missing = len(self.flat.parameters)

    def place(self, slot: int) -> None:
        """Move the gradient of the parameter in `slot` here. Later micro-batches then add to it in place."""
        if self.in_flight:
            raise RuntimeError("a parameter received a second gradient while its bucket was being reduced")
        parameter, view = self.flat.parameters[slot], self.views[slot]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def start_reduction(self) -> None:
        for slot, parameter in enumerate(self.flat.parameters):
            if parameter.grad is not self.views[slot]:  # not used on this rank in this step
                self.place(slot)
        self.shard = self.flat.layout.shard_of(self.full, self.flat.rank)
        self.in_flight = reduce_scatter(self.shard, self.full, self.flat.group)

    def finish_reduction(self) -> None:
        if self.in_flight:
            self.in_flight.wait()
            self.in_flight = None
            for parameter in self.flat.parameters:
                parameter.grad = None  # what is left there is this rank's own part

    def tensors(self) -> list[Tensor]:
        return [self.full]


class Zero1(ShardedStrategy):
    """Optimizer states are sharded."""

    shards = frozenset({"optimizer_state"})
    buckets: list[GradientBucket]
    make_bucket: type[GradientBucket] = GradientBucket
    reduces_every_micro_batch = False

    def prepare(self) -> None:
        super().prepare()
        cap_bytes = self.options.fixed_bucket_bytes or self._default_cap_mb() * 2**20
        self.flats = [
            FlatParameters(parameters, self.process_group)
            for segment in self._segments()
            for parameters in fill_buckets(segment, cap_bytes)
        ]
        broadcast_from_rank0(self.plain_tensors(), self.process_group)
        self.buckets = [self.make_bucket(flat) for flat in self.flats]
        self._started = 0
        self._arrivals = Arrivals(self.module, find_blocks(self.module), self.flats)
        for bucket in self.buckets:
            for slot, parameter in enumerate(bucket.flat.parameters):
                parameter.register_post_accumulate_grad_hook(self._on_gradient_ready(bucket, slot))

    def _default_cap_mb(self) -> float:
        """At most a tenth of the gradients, so that buckets in flight stay small beside what sharding saves."""
        return min(DEFAULT_CAP_MB, bytes_of(self.trainable.values()) / 10 / 2**20)

    def _segments(self) -> Iterator[list[nn.Parameter]]:
        """Trainable parameters in the order in which backward makes gradients: heads, blocks, embeddings. They share
        no bucket, so that forward can begin before the parameters of later blocks have arrived."""
        plans = plan_units(self.module, 0) if find_blocks(self.module) else []
        before, after = around_units(self.module, plans)
        for segment in (after, [p for plan in plans for p in plan.parameters], before):
            yield [p for p in segment if p.requires_grad and p.numel()]

    # Gradients ---------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        super().before_step()
        self._started = 0

    def _on_gradient_ready(self, bucket: GradientBucket, slot: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            bucket.place(slot)
            if self.synchronizes_gradients:
                bucket.missing -= 1
                while self._started < len(self.buckets) and self.buckets[self._started].missing == 0:
                    self._start_next()

        return hook

    def _start_next(self) -> None:
        self.buckets[self._started].start_reduction()
        self._started += 1

    def finish_gradient_synchronization(self) -> None:
        while self._started < len(self.buckets):  # those that wait for a gradient that backward did not make
            self._start_next()
        for bucket in self.buckets:
            bucket.finish_reduction()
            bucket.missing = len(bucket.flat.parameters)
        self.take_gradients()

    # Parameters --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        super().step()
        for flat in reversed(self.flats):  # the order in which forward needs them
            self._arrivals.start(flat, all_gather(flat.full, self.process_group))

    def finish_parameter_synchronization(self) -> None:
        self._arrivals.wait()

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        payloads, device = [flat.full_bytes for flat in self.flats], self.flats[0].full.device
        reductions = payloads * (micro_batches if self.reduces_every_micro_batch else 1)
        return [
            expected_reduce_scatters(reductions, self.process_group, device),
            expected_all_gathers(payloads, self.process_group, device),
            *buffer_broadcasts(self.module, self.data_parallel_size),
        ]
