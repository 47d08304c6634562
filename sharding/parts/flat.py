"""Flat parameters: how parameters become one flat tensor, and which part of it a rank owns.

Parameters are laid end to end in one flat tensor. It is padded and cut into N equal shards, one for each of N ranks.
Cuts may go through the inside of a parameter. So ranks are balanced by elements whatever the shapes: a shard is less
than 16 bytes larger than an even share. This suits optimizers that treat every element by itself
(`ddp_lab.strategy.optimizers`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.communication.collectives import all_gather
from ddp_lab.strategy.groups import Groups
from sharding.options.placement import Offload, Placement

ALIGNMENT = 16
"""Bytes. Shards begin at multiples of it: CUDA kernels and NCCL then move 16 bytes at a time."""


class ShardPiece(NamedTuple):
    """Elements `start` to `end` of a shard, which belong to the parameter in `slot`."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """Where parameters of these shapes lie in a flat tensor, end to end, and where `world_size` ranks cut it.

    Attributes:
        starts: The first element of each parameter, and their end.
        shard_numel: Elements of each rank's shard, padding included.
        padded_numel: Elements of the flat tensor.
    """

    shapes: Sequence[Sequence[int]]
    world_size: int
    item_bytes: int

    @cached_property
    def starts(self) -> list[int]:
        return [*accumulate(map(prod, self.shapes), initial=0)]

    @property
    def numel(self) -> int:
        return self.starts[-1]

    @cached_property
    def shard_numel(self) -> int:
        multiple = max(ALIGNMENT // self.item_bytes, 1)
        return -(-self.numel // (self.world_size * multiple)) * multiple

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world_size

    def shard_of(self, flat: Tensor, rank: int) -> Tensor:
        """The view of a flat tensor that is `rank`'s shard."""
        return flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def view(self, flat: Tensor, slot: int) -> Tensor:
        """The view of a flat tensor that is the parameter in `slot`, in its shape."""
        return flat[self.starts[slot] : self.starts[slot + 1]].view(self.shapes[slot])

    def pieces(self, rank: int) -> list[ShardPiece]:
        """What of each parameter lies in `rank`'s shard; nothing for those that have no element there."""
        ends = [min(max(start - rank * self.shard_numel, 0), self.shard_numel) for start in self.starts]
        cuts = (ShardPiece(slot, start, end) for slot, (start, end) in enumerate(pairwise(ends)))
        return [piece for piece in cuts if piece.start < piece.end]


def group_by_kind(
    parameters: Iterable[nn.Parameter], groups_of: Callable[[nn.Parameter], object] = lambda _: None
) -> list[list[nn.Parameter]]:
    """Parameters that can share a flat tensor: of one dtype and device, trainable or frozen alike, held by the same
    ranks; in their order."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device, parameter.requires_grad, groups_of(parameter)
        groups.setdefault(kind, []).append(parameter)
    return list(groups.values())


class FlatParameters:
    """Parameters of one dtype and device in one flat tensor, into which they are views.

    The module may compute in a lower precision than the optimizer (`param_dtype`). Then `full` has the lower one, and
    `shard` is apart from it: the master values, which small updates do not round away (Micikevicius et al., 2018,
    "Mixed precision training"). Rank 0's values win. Building one is collective.

    Args:
        groups: Which ranks hold the shards.
        placement: In which dtype the module computes, and whether the shard is in host memory. Frozen parameters stay
            on the device, unless all parameters are offloaded.

    Attributes:
        full: With what the module computes, (padded_numel,).
        views: For each parameter its place in `full`, in its shape.
        shard: What this rank keeps, (shard_numel,), in the parameters' own `dtype`.
        pieces: For each parameter with elements in the shard, a flat parameter on the device. Its `.grad` is the
            reduced gradient of these elements.
        updated: The same, as the optimizer sees it: a view into the shard. Those of `pieces`, unless the shard is in
            host memory.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], groups: Groups, placement: Placement) -> None:
        self.parameters, self.groups = list(parameters), groups
        self.group, self.rank = groups.shard, dist.get_rank(groups.shard)
        first, offload = parameters[0], placement.offload
        self.is_offloaded = offload is not None and (first.requires_grad or offload.part == "parameters")
        self.dtype, self.device, dtype = first.dtype, first.device, placement.param_dtype or first.dtype
        item_bytes = min(dtype.itemsize, first.element_size())
        self.layout = Layout([p.shape for p in parameters], dist.get_world_size(self.group), item_bytes)

        # the flat tensor, and parameters as views into it
        values = self._of_rank0({parameter: parameter.detach() for parameter in parameters})
        self.full = values.to(dtype)
        self.views = [self.layout.view(self.full, slot) for slot in range(len(parameters))]
        self._addresses = [view.data_ptr() for view in self.views]
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

        # the shard, and what of each parameter is in it
        self.shard = self._stored(self.layout.shard_of(values, self.rank), offload)
        self.places = self.layout.pieces(self.rank)
        lengths = [place.end - place.start for place in self.places]
        self._lengths = [*lengths, self.layout.shard_numel - sum(lengths)]
        parts = {self.parameters[place.slot]: self.shard[place.start : place.end] for place in self.places}
        self.pieces = self.updated = {parameter: nn.Parameter(part) for parameter, part in parts.items()}
        if self.is_offloaded:  # of their shapes, on the device, and without memory of their own
            zero = torch.zeros((), dtype=self.dtype, device=self.device)
            self.pieces = {parameter: nn.Parameter(zero.expand(part.shape)) for parameter, part in parts.items()}

    def _of_rank0(self, values: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """Rank 0's `values` in a flat tensor, (padded_numel,). Collective."""
        flat = torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=self.device)
        for slot, parameter in enumerate(self.parameters):
            if parameter in values:
                self.layout.view(flat, slot).copy_(values[parameter])
        dist.broadcast(flat, group=self.groups.work, group_src=0)
        return flat

    def _stored(self, part: Tensor, offload: Offload | None) -> Tensor:
        """This rank's values, in the memory where the optimizer updates them."""
        if offload is not None and self.is_offloaded:
            return offload.empty(part.shape, part.dtype, is_copied=True).copy_(part)
        return part.clone() if self.keeps_shard_apart else part

    @property
    def keeps_shard_apart(self) -> bool:
        """Whether `shard` is not simply a part of `full`."""
        return self.is_offloaded or self.full.dtype != self.dtype

    def fill_own_part(self) -> None:
        """Put this rank's values into `full`, before it is gathered."""
        if self.keeps_shard_apart:
            self.layout.shard_of(self.full, self.rank).copy_(self.shard, non_blocking=True)

    def shard_has_changed(self) -> None:
        """Bring to the device what it keeps of the shard between steps: nothing, because `full` is gathered."""

    def tensors(self) -> list[Tensor]:
        """What is on the device."""
        return [self.full] if self.is_offloaded else [self.full, self.shard]

    def require_in_place(self) -> None:
        """
        Raises:
            UnsupportedError: a parameter's `.data` has been replaced, so that the module does not compute with `full`.
        """
        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise UnsupportedError(
                    f"the data of a parameter of shape {tuple(parameter.shape)} was replaced since the strategy was "
                    "built, and would not be updated; change it in place, or through load_full_state_dict"
                )

    def whole(self) -> Tensor:
        """All ranks' values in the shard's dtype, (padded_numel,). Not to be changed. Collective."""
        return self.gathered(self.shard) if self.keeps_shard_apart else self.full

    def gathered(self, shard: Tensor | None) -> Tensor:
        """All ranks' shards in this layout, (padded_numel,); zeros of a rank that gives none. Collective."""
        flat = torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=self.device)
        if shard is not None:
            self.layout.shard_of(flat, self.rank).copy_(shard)
        all_gather(flat, self.group).wait()
        return flat

    def set_values(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Take rank 0's `values`, which others need not give. Collective."""
        flat = self._of_rank0(values)
        self.shard.copy_(self.layout.shard_of(flat, self.rank))
        self.fill_full(flat)

    def fill_full(self, values: Tensor) -> None:
        """Let the module compute with `values`."""
        self.full.copy_(values)

    @property
    def trainable(self) -> bool:
        return self.parameters[0].requires_grad

    @property
    def full_bytes(self) -> int:
        return self.full.numel() * self.full.element_size()

    def parts(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Each parameter with elements in the shard, these as they are updated, and the first one's number."""
        for place, (parameter, piece) in zip(self.places, self.updated.items(), strict=True):
            yield parameter, piece, self.rank * self.layout.shard_numel + place.start - self.layout.starts[place.slot]

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Give each piece its part of the shard of the reduced gradient, or none."""
        parts = [None] * len(self.places) if gradient is None else gradient.split(self._lengths)
        for piece, part in zip(self.pieces.values(), parts, strict=False):  # the last part is padding
            piece.grad = part
