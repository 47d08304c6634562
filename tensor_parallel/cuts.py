"""Which part of a parameter each rank has."""

from itertools import pairwise
from typing import cast

import torch
from torch import nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.model_parallel import Cut
from ddp_lab.strategy.optimizers import copy_attributes


def cut_evenly(
    name: str, kind: str, length: int, dim: int, size: int, heads: int | None = None, shares: bool = False
) -> Cut:
    """Cut a dimension into one range for each of `size` ranks, as even as can be; between heads, if there are.

    Args:
        name, kind: Of the layer and of its entries, for errors.
        shares: With fewer heads than ranks, several ranks may hold the same head.
    """
    unit, remainder = divmod(length, heads) if heads else (1, 0)
    if remainder:
        raise UnsupportedError(f"--plan: {name} has {length} {kind}, which are not {heads} equal heads")
    count = heads or length
    if heads and shares and count < size and size % count == 0:
        bounds = [(rank * count // size, rank * count // size + 1) for rank in range(size)]
    elif (heads and count % size) or count < size:
        kind = "heads" if heads else kind
        raise UnsupportedError(f"--mesh: {name} has {count} {kind}, which cannot be cut over {size} ranks of tp")
    else:
        bounds = list(pairwise(count * rank // size for rank in range(size + 1)))
    return Cut(dim, length, tuple(((first * unit, end * unit),) for first, end in bounds))


def cut_in_parts(cut: Cut, parts: int) -> Cut:
    """Of `parts` equal tensors in one, each cut as `cut` says, which is for one of them."""
    length = cut.length
    ranges = tuple(
        tuple((first + length * index, end + length * index) for index in range(parts) for first, end in of_rank)
        for of_rank in cut.ranges
    )
    return Cut(cut.dim, length * parts, ranges)


def weight_of(layer: nn.Module) -> nn.Parameter:
    return cast(nn.Parameter, layer.weight)


def is_transposed(layer: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as in GPT-2."""
    if type(layer) is nn.Linear:
        return False
    if type(layer).__name__ == "Conv1D":
        return True
    raise UnsupportedError(f"--plan: {type(layer).__name__} is no linear layer, and cannot be cut")


class CutParameters:
    """Cuts parameters, tied ones together.

    Attributes:
        cuts: By name.
    """

    def __init__(self, rank: int) -> None:
        self.cuts: dict[str, Cut] = {}
        self._rank = rank
        self._parts: dict[torch.Tensor, tuple[Cut, nn.Parameter]] = {}  # by whole parameter

    def cut(self, layer: nn.Module, path: str, name: str, cut: Cut) -> nn.Parameter | None:
        """Replace a parameter of `layer` by this rank's part. `path`: the layer's name. None if it has no such one."""
        whole = layer._parameters[name]
        if whole is None:
            return None
        self.cuts[f"{path}.{name}"] = cut
        before, part = self._parts.get(whole, (cut, None))
        if before != cut:
            raise UnsupportedError(f"--plan: {path}.{name} is tied to a parameter that is cut in another way")
        if part is None:
            part = nn.Parameter(cut.part(whole.detach(), self._rank), whole.requires_grad)
            copy_attributes(whole, part)
            self._parts[whole] = cut, part
        layer._parameters[name] = part
        return part
