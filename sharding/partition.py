"""How parameters are cut into shards: pure functions from shapes to places, without a process group.

Parameters are laid end to end in one flat tensor, which is padded to a multiple of the world size and cut into equal
shards, a rank each. Cuts go through the inside of parameters, so ranks are balanced by elements whatever the shapes: a
shard is less than one element larger than an even share. That is right for optimizers that treat every element by
itself, such as SGD and Adam; `require_elementwise` finds out whether one does.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from training.errors import UnsupportedError


@dataclass(frozen=True)
class Slot:
    """Elements `start` to `end` of a flat tensor, which hold one parameter of this shape."""

    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `end` of a shard, which belong to the parameter in `slot`."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """Where parameters lie in a flat tensor, and where `world_size` ranks cut it.

    Attributes:
        numel: Elements of all parameters.
        shard_numel: Elements of each rank's shard, padding included.
        padded_numel: Elements of the flat tensor.
    """

    slots: tuple[Slot, ...]
    world_size: int

    @property
    def numel(self) -> int:
        return self.slots[-1].end if self.slots else 0

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.world_size)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world_size

    def shard_of(self, flat: Tensor, rank: int) -> Tensor:
        """The view of a flat tensor that is `rank`'s shard."""
        return flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def view(self, flat: Tensor, slot: int) -> Tensor:
        """The view of a flat tensor that is the parameter in `slot`, in its shape."""
        place = self.slots[slot]
        return flat[place.start : place.end].view(place.shape)

    def pieces(self, rank: int) -> list[Piece]:
        """What of each parameter lies in `rank`'s shard; nothing for those that have no element there."""
        begin = rank * self.shard_numel
        cuts = [
            (slot, max(place.start - begin, 0), min(place.end - begin, self.shard_numel))
            for slot, place in enumerate(self.slots)
        ]
        return [Piece(slot, start, end) for slot, start, end in cuts if start < end]


def lay_out(shapes: Iterable[Sequence[int]], world_size: int) -> Layout:
    """Lay parameters of these shapes end to end."""
    slots, end = [], 0
    for shape in shapes:
        start, end = end, end + prod(shape)
        slots.append(Slot(tuple(shape), start, end))
    return Layout(tuple(slots), world_size)


def group_by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that can share a flat tensor: of one dtype and device, trainable or frozen alike; in their order."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(parameter)
    return list(groups.values())


def require_elementwise(make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that needs whole parameters, found by trying: one that works on each element by itself gives
    the same from a matrix as from two pieces of it.

    Raises:
        UnsupportedError: it does not (Muon, Adafactor, LARS and their like).
    """
    generator = torch.Generator().manual_seed(0)
    start, scale = torch.randn(4, 6, generator=generator), torch.logspace(-2, 2, 24).view(4, 6)
    whole = nn.Parameter(start.clone())
    cut = [nn.Parameter(piece.clone()) for piece in start.view(-1).split([7, 17])]
    problem = ""
    try:
        for parameters in ([whole], cut):
            optimizer = make_optimizer(parameters)
            for step in range(1, 4):
                gradient = scale.roll(step) * torch.sin(step * start)
                pieces = [gradient] if parameters is not cut else list(gradient.view(-1).split([7, 17]))
                for parameter, piece in zip(parameters, pieces, strict=True):
                    parameter.grad = piece.clone()
                optimizer.step()
    except (ValueError, RuntimeError, TypeError) as error:
        problem = f": {error}"
    if problem or not torch.allclose(whole.detach().view(-1), torch.cat([p.detach() for p in cut]), rtol=1e-4):
        name = type(optimizer).__name__ if not problem else "this optimizer"
        raise UnsupportedError(
            f"{name} does not work on each element by itself{problem}; sharding cuts parameters into flat pieces, so "
            "use an elementwise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad), or a replicated strategy"
        )
