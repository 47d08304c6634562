"""Parameters that are cut over ranks (`strategy.model_parallel`): which rank saves which part, under which key, and how
a rank gets its part of a parameter that is stored whole, or cut in another way.

The elements of a part are counted like those of a parameter that is whole. `<name>@<rank>` is the part of that rank of
those over which the parameter is cut. Ranks may hold the same part: then the first of them saves it. Rank 0 of tensor
parallelism saves what is not cut.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ddp_lab.runtime.checkpoint.files import TensorFiles
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.model_parallel import Cut
from ddp_lab.strategy.strategy import Strategy


class OwnParts:
    """What this rank holds of the parameters of a strategy: by name `cuts`, and `shapes` of whole parameters."""

    def __init__(self, strategy: Strategy) -> None:
        parallel = self._parallel = strategy.model_parallel
        named = dict(strategy.module.named_parameters())
        cuts = parallel.cuts if parallel else {}
        self.cuts = {name: cuts[name] for name in named if name in cuts}
        self.shapes = {n: self.cuts[n].whole_shape(p) if n in self.cuts else tuple(p.shape) for n, p in named.items()}

    def of_all_stages(self, entries: dict[str, Any]) -> dict[str, Any]:
        """By name, what ranks say of the parameters or buffers that they hold. Collective."""
        return self._parallel.of_all_stages(entries) if self._parallel else entries

    def owner(self, name: str) -> int:
        """The rank that saves what this one holds of a parameter."""
        return self.cuts[name].owner(self.rank(name)) if name in self.cuts else 0

    def rank(self, name: str) -> int:
        """The number of this rank among those over which a parameter is cut."""
        return self._parallel.rank_in(self.cuts[name]) if self._parallel and name in self.cuts else 0

    @property
    def tensor_rank(self) -> int:
        """Whose part of the layers this rank holds."""
        return self._parallel.tensor_rank if self._parallel else 0

    def is_saved_here(self, name: str) -> bool:
        return self._parallel is None or self._parallel.is_owner(name)

    def key(self, name: str) -> str:
        """What stands for this rank's part of a parameter in the keys of a checkpoint."""
        return part_key(name, self.cuts.get(name), self.owner(name))


def part_key(name: str, cut: Cut | None, rank: int) -> str:
    return f"{name}@{rank}" if cut else name


class StoredParts:
    """Reads from a checkpoint, whose parameters are cut by `cuts`, what this rank holds."""

    def __init__(self, files: TensorFiles, cuts: Mapping[str, Cut], parts: OwnParts) -> None:
        self._files, self._cuts, self._parts = files, cuts, parts

    def first_key(self, name: str) -> str:
        """What stands in keys for a part of a parameter that is always stored."""
        return part_key(name, self._cuts.get(name), 0)

    def read(self, kind: str, name: str, start: int, end: int) -> Tensor:
        """Elements `start` to `end` of what this rank holds of a parameter or a state of it, (end - start,) on CPU.

        If it is cut as it was when it was saved, only these are read. Otherwise the whole tensor is put together.
        `kind`: `parameter`, or `optimizer/<state>`.
        """
        own_cut, stored = self._parts.cuts.get(name), self._cuts.get(name)
        if own_cut == stored:
            return self._files.read(f"{kind}/{self._parts.key(name)}", start, end)
        whole = read_whole(self._files, f"{kind}/{name}", self._parts.shapes[name], stored)
        part = own_cut.part(whole, self._parts.rank(name)) if own_cut else whole
        return part.reshape(-1)[start:end]


def read_whole(files: TensorFiles, key: str, shape: Sequence[int], cut: Cut | None) -> Tensor:
    """A whole tensor, from its parts if it is stored as such. `key`: without a part, such as `parameter/<name>`."""
    if cut is None:
        return files.read(key, 0, prod(shape)).view(shape)
    whole, is_there = None, torch.zeros(shape, dtype=torch.bool, device="cpu")
    try:
        for rank in filter(cut.is_owner, range(len(cut.ranges))):
            part_shape = cut.part_shape(is_there, rank)
            part = files.read(f"{key}@{rank}", 0, prod(part_shape)).view(part_shape)
            whole = part.new_empty(shape) if whole is None else whole
            for target, values in ((whole, part), (is_there, torch.ones_like(part))):
                cut.put(target, values, rank)
    except (IndexError, RuntimeError):  # it is not within the tensor
        is_there.zero_()
    if whole is None or not is_there.all():
        raise UserError(f"the checkpoint is damaged, or of another model: {key} {(*shape,)} is cut wrongly there")
    return whole
