"""ZeRO-2: as ZeRO-1, and a full gradient lives only until its bucket is reduced.

After the reduce-scatter a rank needs nothing but its shard of the sum, so the full bucket is freed. Gradient memory at
rest is then P / N elements, and its peak that shard plus the buckets in flight: one that fills while the two before
it are being reduced. With several micro-batches a step, each is reduced into the shard as it comes, since to wait for
the last would mean to hold full gradients again: K reduce-scatters and one all-gather, (K + 1)(N-1)/N * P elements on
the wire for K micro-batches, 2(N-1)/N * P as in DDP for one.

Fp32 bytes a rank, beside activations: 4 P parameters, 4 P / N gradients, 8 P / N optimizer states.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sharding.collectives import free, reduce_scatter
from sharding.zero1 import GradientBucket, Zero1

IN_FLIGHT = 2
"""Buckets that are reduced while one fills; with a single one, the link and backward wait for each other in turn."""


class FreedGradientBucket(GradientBucket):
    """Full gradients from the first one of a backward pass until they are reduced; then the shard, which is kept and
    added to."""

    full: Tensor | None  # type: ignore[assignment]

    def allocate(self) -> None:
        self.full = None
        self._sum: Tensor | None = None
        self._placed: set[int] = set()

    def forget(self) -> None:
        super().forget()
        self.allocate()

    def place(self, slot: int) -> None:
        if self.in_flight:
            raise RuntimeError("a parameter received a second gradient while its bucket was being reduced")
        parameter = self.flat.parameters[slot]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.numel() == self.flat.layout.padded_numel and gradient.is_contiguous():
            self.full, self._may_free = gradient.view(-1), False  # the whole bucket: nothing to put together
        else:
            if self.full is None:
                self.full, self._may_free = torch.empty_like(self.flat.full), True
            self.flat.layout.view(self.full, slot).copy_(gradient)
        self._placed.add(slot)

    def start_reduction(self) -> None:
        if self.full is None:
            self.full, self._may_free = torch.zeros_like(self.flat.full), True
        for slot in range(len(self.flat.parameters)):
            if slot not in self._placed:  # not used on this rank by this micro-batch
                self.flat.layout.view(self.full, slot).zero_()
        self.full[self.flat.layout.numel :] = 0
        self._sum = torch.empty_like(self.flat.shard)
        self.in_flight = reduce_scatter(self._sum, self.full, self.flat.group)

    def finish_reduction(self) -> None:
        if self.in_flight and self._sum is not None:
            self.in_flight.wait()
            self.shard = self._sum if self.shard is None else self.shard.add_(self._sum)
            if self._may_free:  # a gradient that autograd made may share its memory with another
                free(self.full)
            self.in_flight = self.full = self._sum = None
            self._placed = set()

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.full, self.shard, self._sum) if tensor is not None]


class Zero2(Zero1):
    """Optimizer states and gradients are sharded."""

    shards = frozenset({"optimizer_state", "gradients"})
    make_bucket = FreedGradientBucket
    reduces_every_micro_batch = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing: every micro-batch is reduced."""
        yield

    def _start_next(self) -> None:
        super()._start_next()
        if self._started > IN_FLIGHT:
            self.buckets[self._started - 1 - IN_FLIGHT].finish_reduction()

    def after_backward(self) -> None:
        super().finish_gradient_synchronization()
        self._started = 0

    def finish_gradient_synchronization(self) -> None:
        """Nothing is left to do at the end of a step: each micro-batch was finished after its backward pass."""
