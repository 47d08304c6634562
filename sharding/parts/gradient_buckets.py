"""Buckets of gradients that are reduce-scattered: kept whole (ZeRO-1), or freed once they are reduced (ZeRO-2, 3).

A bucket's life in one backward pass: autograd makes gradients, and `collect` moves them here, several by one copy; when
none is `missing`, `start_reduction`; `finish_reduction` when the sum is needed. Then `shard` holds this rank's part of
the sum; with replicas (`sharding.options.replicas`), after `finish_replicas`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
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
        views: For each parameter its place in `full`, in its shape; none while it is not made.
        shard: The sum over ranks, (shard_numel,), in the dtype of the update, once reduced.
        missing: Gradients still to come before the bucket can be reduced.
        in_flight: The reduce-scatter, from its start until it is waited for.
        averages: Whether reductions give the average over ranks instead of the sum.
        most_waiting: Bytes of gradients that wait to be copied together.
        moves_at: The parameters, by their slots, with whose gradients that many bytes wait.
    """

    averages = False
    most_waiting = MOST_WAITING

    def __init__(self, flat: FlatParameters, dtype: torch.dtype | None = None) -> None:
        self.flat, self.dtype = flat, dtype or flat.full.dtype
        self.replicas = SumOverReplicas(flat.ranks, self.dtype) if flat.ranks.replicate else None
        self.casts = self.dtype != flat.full.dtype
        self.moves_at = moves_at(flat.parameters, self.most_waiting)
        self._placed: set[int] = set()
        self.full: Tensor | None = None
        self.views: Sequence[Tensor] = ()
        self.in_flight: Pending | None = None
        self._abandoned: list[object] = []
        self.reset()

    def reset(self) -> None:
        """Begin a new step: no gradient is here, and none is in the shard."""
        to_replicas = self.replicas is not None and self.replicas.abandon()
        if self.in_flight or to_replicas:  # of a step that was abandoned: the reduction may go on in the old tensors
            self._abandoned.append((self.in_flight, self.tensors()))
        self.drop()
        self.shard: Tensor | None = None
        self.missing = len(self.flat.parameters)

    def drop(self) -> None:
        """Free the full gradients."""
        self.full, self.views, self.in_flight = None, (), None
        self._placed.clear()

    def receive(self, moves: bool, counts: bool = True) -> None:
        """Autograd has made a gradient; the last one of its parameter before the reduction if it `counts`.

        Args:
            moves: Whether its slot is in `moves_at`.
        """
        self.missing -= counts
        if moves and counts:
            self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        """Move the gradients here that autograd has made since, by one copy. It adds those of later micro-batches in
        place, if they have the bucket's dtype."""
        found = ((slot, parameter.grad) for slot, parameter in enumerate(self.flat.parameters))
        new = {slot: g for slot, g in found if g is not None and not (self.views and g is self.views[slot])}
        if self._is_whole(new) and is_own(new[0]):
            self.full, self.views = new[0].view(-1), [new[0]]
        elif new:
            self.make_full()
            self._place(new)
        for slot in new:
            self.flat.parameters[slot].grad = None if self.casts else self.views[slot]
        if self.casts:
            self._placed |= new.keys()

    def _is_whole(self, new: Mapping[int, Tensor]) -> bool:
        """Whether the one gradient in `new` may become the full tensor as it is, so that nothing is copied."""
        fits = 0 in new and new[0].numel() == self.flat.layout.padded_numel and new[0].is_contiguous()
        return fits and self.full is None and not self.casts

    def make_full(self) -> Tensor:
        """The full tensor, made if it is not there."""
        if self.full is None:
            self.full = torch.empty_like(self.flat.full, dtype=self.dtype)
            self._clear_padding(self.full)
            self.views = unflatten(self.full, self.flat.parameters)
        return self.full

    def _clear_padding(self, full: Tensor) -> None:
        if self.flat.layout.padded_numel > self.flat.layout.numel:
            full[self.flat.layout.numel :] = 0

    def _place(self, new: Mapping[int, Tensor]) -> None:
        """Copy gradients here, or add them to those of earlier micro-batches."""
        if first := new.keys() - self._placed:
            torch._foreach_copy_([self.views[slot] for slot in first], [new[slot] for slot in first])
        if again := new.keys() & self._placed:
            torch._foreach_add_([self.views[slot] for slot in again], [new[slot] for slot in again])

    def complete(self) -> Tensor:
        """The full tensor, with zeros where this rank made no gradient."""
        self.collect()
        full = self.make_full()
        for slot, parameter in enumerate(self.flat.parameters):
            if parameter.grad is None and slot not in self._placed:
                self.views[slot].zero_()
        return full

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
            for parameter in self.flat.parameters:
                parameter.grad = None  # what is left there is this rank's own part
            assert self.shard is not None
            self.pass_on(self.shard)

    def pass_on(self, part: Tensor) -> None:
        """Take a sum over the ranks that shard, in place of the shard or, with replicas, for the sum over them."""
        if self.replicas is None:
            self.take(part)
        else:
            self.replicas.add(part.to(self.flat.dtype), self.averages)

    def finish_replicas(self, is_last: bool) -> None:
        """Wait for the sum over replicas, if there are any. `is_last`: No further micro-batch follows."""
        if self.replicas is not None:
            if is_last:
                self.replicas.start(self.averages)  # what is left if this micro-batch had no backward pass
            for total in self.replicas.finish():
                self.take(total)

    def take(self, total: Tensor) -> None:
        """Make the sum over all ranks the shard."""
        self.shard = total.to(self.flat.dtype)

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.full, self.shard, *self._to_replicas()) if tensor is not None]

    def _to_replicas(self) -> list[Tensor]:
        return [] if self.replicas is None else self.replicas.tensors()

    @property
    def full_bytes(self) -> int:
        """What a reduction sends."""
        return self.flat.layout.padded_numel * self.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """What a sum over replicas sends."""
        return self.flat.layout.shard_numel * self.dtype.itemsize


class ShardedGradientBucket(GradientBucket):
    """Holds full gradients only from the first one of a backward pass until they are reduced, and then the shard.

    Each micro-batch is reduced, and its sum is added to the shard. The full tensor's memory is freed and allocated
    again, rather than the tensor replaced.
    """

    most_waiting = 25 * 2**20  # memory for a whole bucket is made late
    _buffer: Tensor | None = None
    _views: Sequence[Tensor] = ()
    _sum: Tensor | None = None

    def reset(self) -> None:
        if self.in_flight:  # of a step that was abandoned: it may go on in the old buffer
            self._buffer = None
        super().reset()

    def drop(self) -> None:
        """Free the full gradients, unless autograd made them: they may share their memory with another."""
        free(self._buffer)
        self.in_flight = self.full = self._sum = None
        self.views = ()
        self._placed.clear()

    @torch.no_grad()
    def collect(self) -> None:
        found = ((slot, parameter.grad) for slot, parameter in enumerate(self.flat.parameters))
        new = {slot: gradient for slot, gradient in found if gradient is not None}
        if self._is_whole(new):
            self.full, self.views = new[0].view(-1), [new[0]]
        elif new:
            self.make_full()
            self._place(new)
        for slot in new:
            self.flat.parameters[slot].grad = None
        self._placed |= new.keys()

    def make_full(self) -> Tensor:
        if self.full is None and self._buffer is None:
            self._buffer = super().make_full()
            self._views = self.views
        elif self.full is None and self._buffer is not None:
            self.full, self.views = self._buffer, self._views
            self.full.untyped_storage().resize_(self.full_bytes)
            self._clear_padding(self.full)
        assert self.full is not None
        return self.full

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

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.full, self.shard, self._sum, *self._to_replicas()) if tensor is not None]
