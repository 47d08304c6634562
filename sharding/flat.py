"""Parameters in a flat tensor, of which this rank owns a shard."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharding.partition import lay_out


class FlatParameters:
    """Parameters of one dtype and device, laid end to end in one flat tensor into which they are views.

    Rank 0's values win. Building one is collective.

    Attributes:
        layout: Where each parameter lies (`sharding.partition.Layout`).
        full: The flat tensor, (padded_numel,).
        views: For each parameter its place in `full`, in its shape.
        shard: The part of `full` that this rank updates, (shard_numel,).
        pieces: What this rank's optimizer sees: for each parameter with elements in the shard, a flat parameter that is
            a view of them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters, self.group, self.rank = list(parameters), group, dist.get_rank(group)
        self.layout = lay_out((p.shape for p in parameters), dist.get_world_size(group))
        first = parameters[0]
        self.full = torch.zeros(self.layout.padded_numel, dtype=first.dtype, device=first.device)
        self.views = [self.layout.view(self.full, slot) for slot in range(len(parameters))]
        for parameter, view in zip(self.parameters, self.views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        dist.broadcast(self.full, group=group, group_src=0)
        self.shard = self.place_shard()
        self._places = self.layout.pieces(self.rank)
        self.pieces = {
            self.parameters[place.slot]: nn.Parameter(self.shard[place.start : place.end]) for place in self._places
        }

    def place_shard(self) -> Tensor:
        """Where this rank's shard is kept: in `full`, which stays."""
        return self.layout.shard_of(self.full, self.rank)

    @property
    def trainable(self) -> bool:
        return self.parameters[0].requires_grad

    @property
    def full_bytes(self) -> int:
        return self.full.numel() * self.full.element_size()

    def first_elements(self) -> list[int]:
        """For each of `pieces`, the number of its first element in its parameter."""
        begin = self.rank * self.layout.shard_numel
        return [begin + place.start - self.layout.slots[place.slot].start for place in self._places]

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Give each piece its part of the shard of the reduced gradient, or none."""
        for place, piece in zip(self._places, self.pieces.values(), strict=True):
            piece.grad = None if gradient is None else gradient[place.start : place.end]
