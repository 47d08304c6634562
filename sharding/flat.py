"""Parameters in a flat tensor of which this rank owns a shard, and the gradients that belong to it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharding.collectives import Pending, all_gather, reduce_scatter
from sharding.partition import lay_out


class FlatParameters:
    """Parameters of one dtype and device, laid end to end in one flat tensor into which they are views.

    Attributes:
        layout: Where each parameter lies (`sharding.partition.Layout`).
        full: The flat tensor, (padded_numel,).
        shard: This rank's part of it, (shard_numel,).
        pieces: What the optimizer of this rank updates: for each parameter with elements in the shard, a flat parameter
            that is a view of them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = list(parameters)
        self.group = group
        self.layout = lay_out((p.shape for p in parameters), dist.get_world_size(group))
        first = parameters[0]
        self.full = torch.zeros(self.layout.padded_numel, dtype=first.dtype, device=first.device)
        self.views = [self.layout.view(self.full, slot) for slot in range(len(parameters))]
        for parameter, view in zip(self.parameters, self.views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        dist.broadcast(self.full, group=group, group_src=0)
        self.cut(self.layout.shard_of(self.full, dist.get_rank(group)))

    def cut(self, shard: Tensor) -> None:
        """Make `shard`, of the shard's elements, the place where this rank keeps and updates them."""
        self.shard = shard
        self._places = self.layout.pieces(dist.get_rank(self.group))
        self.pieces = {
            self.parameters[place.slot]: nn.Parameter(shard[place.start : place.end]) for place in self._places
        }

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Give each piece its part of the reduced gradient's shard, or none."""
        for place, piece in zip(self._places, self.pieces.values(), strict=True):
            piece.grad = None if gradient is None else gradient[place.start : place.end]

    def all_gather(self) -> Pending:
        """Start to fetch what the other ranks have updated."""
        return all_gather(self.full, self.group)


class GradientBucket:
    """The gradients of some flat parameters: a flat tensor, all-allocated, into which gradients are moved.

    Attributes:
        full: This rank's own gradients, (padded_numel,).
        missing: How many gradients are still to come before it can be reduced.
        in_flight: The reduction under way, if there is one.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self.flat = flat
        self.full = self.allocate()
        self.in_flight: Pending | None = None
        self.reset()

    def allocate(self) -> Tensor:
        return torch.zeros_like(self.flat.full)

    def reset(self) -> None:
        """Await the gradients of another backward pass."""
        self.missing = len(self.flat.parameters)

    def place_gradient(self, slot: int) -> None:
        """Make `.grad` of the parameter in `slot` the view into this bucket, with the same values."""
        parameter, view = self.flat.parameters[slot], self.flat.layout.view(self.full, slot)
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
        parameter.grad = view
