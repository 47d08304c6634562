"""Buckets of gradients that are reduce-scattered: kept whole (ZeRO-1), or freed once they are reduced (ZeRO-2, 3).

A bucket's life in one backward pass: `place` each gradient as autograd makes it; `start_reduction` when none is
`missing`; `finish_reduction` when the sum is needed. Then `shard` holds this rank's part of the sum; with replicas
(`sharding.options.replicas`), after `finish_replicas`.
"""

import torch
from torch import Tensor

from ddp_lab.strategy.communication.collectives import Pending, free, reduce_scatter
from sharding.options.replicas import SumOverReplicas
from sharding.parts.flat import FlatParameters


class GradientBucket:
    """The gradients of some flat parameters, in a flat tensor that stays. The sum's shard replaces this rank's part.

    Args:
        dtype: In which gradients of several micro-batches are added up, and reduced. Default: that of the gradients.

    Attributes:
        full: This rank's own gradients, (padded_numel,).
        shard: The sum over ranks, (shard_numel,), in the dtype of the update, once reduced.
        missing: Gradients still to come before the bucket can be reduced.
        in_flight: The reduce-scatter, from its start until it is waited for.
        averages: Whether reductions give the average over ranks instead of the sum.
    """

    averages = False

    def __init__(self, flat: FlatParameters, dtype: torch.dtype | None = None) -> None:
        self.flat, self.dtype = flat, dtype or flat.full.dtype
        self.replicas = SumOverReplicas(flat.ranks, self.dtype) if flat.ranks.replicate else None
        self.casts = self.dtype != flat.full.dtype
        self._placed: set[int] = set()
        self.allocate()
        self.in_flight: Pending | None = None
        self._abandoned: list[object] = []
        self.reset()

    def allocate(self) -> None:
        self.full = torch.zeros_like(self.flat.full, dtype=self.dtype)
        self.views = [self.flat.layout.view(self.full, slot) for slot in range(len(self.flat.parameters))]

    def reset(self) -> None:
        """Begin a new step: no gradient is here, and none is in the shard."""
        to_replicas = self.replicas is not None and self.replicas.abandon()
        if self.in_flight or to_replicas:  # of a step that was abandoned: the reduction may go on in the old tensors
            self._abandoned.append((self.in_flight, self.tensors()))
            self.allocate()
        self.shard: Tensor | None = None
        self.in_flight = None
        self._placed.clear()
        self.missing = len(self.flat.parameters)

    def place(self, slot: int) -> None:
        """Move the gradient of the parameter in `slot` here. Autograd adds those of later micro-batches in place, if
        they have the bucket's dtype."""
        parameter, view = self.flat.parameters[slot], self.views[slot]
        if parameter.grad is None:
            view.zero_()
        elif slot in self._placed:
            view.add_(parameter.grad)
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        if self.casts:
            self._placed.add(slot)
        parameter.grad = None if self.casts else view

    def start_reduction(self) -> None:
        for slot, parameter in enumerate(self.flat.parameters):
            is_placed = slot in self._placed if self.casts else parameter.grad is self.views[slot]
            if not is_placed:  # not used on this rank in this step
                self.place(slot)
        self.shard = self.flat.layout.shard_of(self.full, self.flat.rank)
        self.in_flight = reduce_scatter(self.shard, self.full, self.flat.group, self.averages)

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
            self.replicas.add(part.to(self.flat.update_dtype), self.averages)

    def finish_replicas(self, is_last: bool) -> None:
        """Wait for the sum over replicas, if there are any. `is_last`: No further micro-batch follows."""
        if self.replicas is not None:
            if is_last:
                self.replicas.start(self.averages)  # what is left if this micro-batch had no backward pass
            for total in self.replicas.finish():
                self.take(total)

    def take(self, total: Tensor) -> None:
        """Make the sum over all ranks the shard."""
        self.shard = total.to(self.flat.update_dtype)

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

    Each micro-batch is reduced, and its sum is added to the shard.
    """

    full: Tensor | None  # type: ignore[assignment]

    def allocate(self) -> None:
        self.full = None
        self._sum: Tensor | None = None
        self._placed.clear()

    def reset(self) -> None:
        super().reset()
        self.allocate()

    def place(self, slot: int) -> None:
        parameter = self.flat.parameters[slot]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.numel() == self.flat.layout.padded_numel and gradient.is_contiguous() and not self.casts:
            self.full, self._may_free = gradient.view(-1), False  # the whole bucket: no copy is needed
        else:
            if self.full is None:
                self.full, self._may_free = self._empty_full(), True
                self._places = self.flat.layout.cut(self.full)
            self._places[slot].copy_(gradient.reshape(-1))
        self._placed.add(slot)

    def start_reduction(self) -> None:
        if self.full is None:
            self.full, self._may_free = self._empty_full().zero_(), True
        for slot in range(len(self.flat.parameters)):
            if slot not in self._placed:  # not used on this rank by this micro-batch
                self.flat.layout.view(self.full, slot).zero_()
        self.full[self.flat.layout.numel :] = 0
        self._sum = torch.empty_like(self.flat.shard, dtype=self.dtype, device=self.full.device)
        self.in_flight = reduce_scatter(self._sum, self.full, self.flat.group, self.averages)

    def finish_reduction(self) -> None:
        if self.in_flight and self._sum is not None:
            self.wait()
            self.pass_on(self._sum)
            if self._may_free:  # a gradient that autograd made may share its memory with another
                free(self.full)
            self.in_flight = self.full = self._sum = None
            self._placed.clear()

    def take(self, total: Tensor) -> None:
        """Add a micro-batch's sum over all ranks to the shard."""
        self.shard = total.to(self.flat.update_dtype) if self.shard is None else self.shard.add_(total)

    def _empty_full(self) -> Tensor:
        return torch.empty_like(self.flat.full, dtype=self.dtype)

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.full, self.shard, self._sum, *self._to_replicas()) if tensor is not None]
