"""Buckets of gradients that are reduce-scattered: kept whole (ZeRO-1), or freed once they are reduced (ZeRO-2, 3).

A bucket's life in one backward pass: autograd makes gradients, and `collect` moves them here, several by one copy; when
none is `missing`, `start_reduction`; `finish_reduction` when the sum is needed. Then `shard` holds this rank's part of
the sum; with replicas (`sharding.options.replicas`), after `finish_replicas`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

from ddp.buckets import MOST_WAITING, moves_at
from ddp_lab.strategy.communication.collectives import Pending, free, reduce_scatter
from ddp_lab.strategy.replicated import is_own
from sharding.options.replicas import SumOverReplicas
from sharding.parts.flat import FlatParameters


class GradientBucket:
    """The gradients of some flat parameters, in a flat tensor that is made when the first of them come into it, and
    stays until `reset`. The sum's shard replaces this rank's part.

    Args:
        dtype: In which gradients of several micro-batches are added up, and reduced. Default: that of the gradients.

    Attributes:
        full: This rank's own gradients, (padded_numel,), if there are any.
        shard: The sum over ranks, (shard_numel,), in the dtype of the update, once reduced.
        missing: Gradients still to come before the bucket can be reduced.
        in_flight: The reduce-scatter, from its start until it is waited for.
        averages: Whether reductions give the average over ranks instead of the sum.
        is_last: No further micro-batch follows in this step.
        most_waiting: Bytes of gradients that wait to be copied together.
        moves_at: The parameters with whose gradients that many bytes wait.
        stays: The full tensor stays until `reset`.
        keeps_views: Between micro-batches `.grad` is the view into `full`, so that autograd adds the next gradient
            there. Else it is None, and `collect` adds.
    """

    averages, stays, is_last = False, True, True
    _sum: Tensor | None = None  # of a micro-batch, if it is apart from `full`
    most_waiting = MOST_WAITING

    def __init__(self, flat: FlatParameters, dtype: torch.dtype | None = None) -> None:
        self.flat, self.dtype = flat, dtype or flat.full.dtype
        self.replicas = SumOverReplicas(flat.groups.replicate, self.dtype) if flat.groups.replicate else None
        self.casts = self.dtype != flat.full.dtype
        self.keeps_views = self.stays and not self.casts
        self.moves_at = moves_at(flat.parameters, self.most_waiting)
        self._padding, self._empty = flat.layout.padded_numel - flat.layout.numel, flat.full.new_empty(0)
        self._placed: set[int] = set()
        self.full: Tensor | None = None
        self._allocated: Tensor | None = None  # `full`, unless autograd made it
        self._views: Sequence[Tensor] = ()
        self.in_flight: Pending | None = None
        self._abandoned: list[object] = []
        self.reset()

    def reset(self) -> None:
        """Begin a new step, without gradients in the full tensor or the shard."""
        to_replicas = self.replicas is not None and self.replicas.abandon()
        if self.in_flight or to_replicas:  # of a step that was abandoned: the reduction may go on in the old tensors
            self._abandoned.append((self.in_flight, self.tensors()))
        self.drop()
        self.shard: Tensor | None = None
        self.missing = len(self.flat.parameters)

    def drop(self) -> None:
        """Free the full gradients."""
        self.full = self._allocated = self.in_flight = None
        self._views = ()
        self._placed.clear()

    @property
    def views(self) -> Sequence[Tensor]:
        """For each parameter its place in `full`, in its shape."""
        if not self._views:
            self._views = unflatten(self.make_full(), self.flat.parameters)
        return self._views

    @torch.no_grad()
    def collect(self, is_last: bool = False) -> None:
        """Move new gradients into the full tensor, by one copy. `is_last`: no further gradient comes before the
        reduction."""
        gradients = ((slot, parameter.grad) for slot, parameter in enumerate(self.flat.parameters))
        views: Sequence[Tensor | None] = self._views or [None] * len(self.flat.parameters)
        new = {slot: grad for slot, grad in gradients if grad is not None and grad is not views[slot]}
        if self.full is None and len(new) == len(self.flat.parameters) and not self.casts:
            self.full = self.flat_of(list(new.values()))
        elif new:
            self._place(new)
        self._placed |= new.keys()
        for slot in range(len(self.flat.parameters)) if is_last else new:
            self.flat.parameters[slot].grad = self.views[slot] if self.keeps_views and not is_last else None

    def flat_of(self, gradients: Sequence[Tensor]) -> Tensor:
        """The full tensor: one gradient that fills it as it is, or a copy of them all."""
        if len(gradients) == 1 and not self._padding and is_own(gradients[0]):
            return gradients[0].view(-1)
        padding = gradients[0].new_zeros(self._padding) if self._padding else self._empty
        self._allocated = flatten([*gradients, padding])
        return self._allocated

    def make_full(self) -> Tensor:
        """The full tensor, allocated if there is none."""
        if self.full is None:
            self.full = self._allocated = torch.empty_like(self.flat.full, dtype=self.dtype)
            if self._padding:
                self.full[self.flat.layout.numel :] = 0
        return self.full

    def _place(self, new: Mapping[int, Tensor]) -> None:
        """Copy gradients into the full tensor, or add them to the sums of earlier micro-batches."""
        added_slots = set() if self.keeps_views else new.keys() & self._placed
        if new_slots := new.keys() - added_slots:
            torch._foreach_copy_([self.views[slot] for slot in new_slots], [new[slot] for slot in new_slots])
        if added_slots:
            torch._foreach_add_([self.views[slot] for slot in added_slots], [new[slot] for slot in added_slots])

    def complete(self) -> Tensor:
        """The full tensor, with zeros where this rank made no gradient."""
        self.collect(is_last=True)
        for slot in set(range(len(self.flat.parameters))) - self._placed:
            self.views[slot].zero_()
        return self.make_full()

    def start_reduction(self) -> None:
        full = self.complete()
        self.shard = self.flat.layout.shard_of(full, self.flat.rank)
        self.in_flight = reduce_scatter(self.shard, full, self.flat.group, self.averages)

    def wait(self) -> None:
        """Wait for the reduce-scatter in flight, and so for those that came before it."""
        assert self.in_flight is not None
        self.in_flight.wait()
        self._abandoned.clear()

    def finish_reduction(self) -> None:
        """Wait for the reduce-scatter, if one is in flight. With replicas, the sum goes on to them."""
        if self.in_flight:
            self.wait()
            self.in_flight = None
            self._placed.clear()
            assert self.shard is not None
            self.pass_on(self.shard)

    def pass_on(self, part: Tensor) -> None:
        """Take a sum over the ranks that shard, in place of the shard or, with replicas, for the sum over them."""
        if self.replicas is None:
            self.take(part)
        else:
            self.replicas.add(part.to(self.flat.dtype))
            if self.is_last:
                self.replicas.start(self.averages)

    def finish_replicas(self) -> None:
        """Wait for the sum over replicas, if there are any."""
        if self.replicas is not None:
            if self.is_last:
                self.replicas.start(self.averages)  # if this micro-batch had no backward pass
            for total in self.replicas.finish():
                self.take(total)

    def take(self, total: Tensor) -> None:
        """Make the sum over all ranks the shard."""
        self.shard = total.to(self.flat.dtype)

    def tensors(self) -> list[Tensor]:
        candidates = [self.full, self.shard, self._sum, *(self.replicas.tensors() if self.replicas else ())]
        return [tensor for tensor in candidates if tensor is not None]

    @property
    def full_bytes(self) -> int:
        """Bytes that a reduction sends."""
        return self.flat.layout.padded_numel * self.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes that a sum over replicas sends."""
        return self.flat.layout.shard_numel * self.dtype.itemsize


class ShardedGradientBucket(GradientBucket):
    """Holds full gradients only from the first one of a backward pass until they are reduced, and then the shard.

    Each micro-batch is reduced, and its sum is added to the shard. The full tensor's memory is freed at once, even
    while a backend's thread still holds the tensor; one that autograd made goes when nobody holds it.
    """

    most_waiting = 25 * 2**20  # memory for a whole bucket is made late
    stays = False

    def reset(self) -> None:
        if self.in_flight:  # of a step that was abandoned: it may go on in the old tensor
            self._allocated = None
        super().reset()

    def drop(self) -> None:
        free(self._allocated)
        self._sum = None
        super().drop()

    def start_reduction(self) -> None:
        full = self.complete()
        self._sum = torch.empty_like(self.flat.shard, dtype=self.dtype, device=full.device)
        self.in_flight = reduce_scatter(self._sum, full, self.flat.group, self.averages)

    def finish_reduction(self) -> None:
        if self.in_flight and self._sum is not None:
            self.wait()
            self.pass_on(self._sum)
            self.drop()

    def take(self, total: Tensor) -> None:
        """Add a micro-batch's sum over all ranks to the shard."""
        self.shard = total.to(self.flat.dtype) if self.shard is None else self.shard.add_(total)
