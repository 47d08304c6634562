"""What a data-parallel strategy must know of a model whose parameters are cut over other ranks.

Such ranks see the same samples, and each holds a part of the model as a plain module. A strategy runs over the ranks
that hold the same part, as if that were the model. It asks here for what concerns the whole model: the norm of all
gradients, the count of samples, and whole state dicts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ddp_lab.runtime.mesh import TENSOR
from ddp_lab.strategy.accounting import Collective

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut over ranks: along one dimension, each rank holds some ranges of it.

    Ranges may differ in length, and ranks may hold the same ones.

    Attributes:
        length: Of the whole tensor along `dim`.
        ranges: By rank, (first, end) of each range.
    """

    dim: int
    length: int
    ranges: tuple[Ranges, ...]

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """What `rank` holds, a new tensor."""
        return torch.cat([whole.narrow(self.dim, first, end - first) for first, end in self.ranges[rank]], self.dim)

    def put(self, whole: Tensor, part: Tensor, rank: int) -> None:
        """Write what `rank` holds into its place in the whole tensor."""
        lengths = [end - first for first, end in self.ranges[rank]]
        for (first, end), piece in zip(self.ranges[rank], part.split(lengths, self.dim), strict=True):
            whole.narrow(self.dim, first, end - first).copy_(piece)

    def whole_shape(self, part: Tensor) -> tuple[int, ...]:
        shape = list(part.shape)
        shape[self.dim] = self.length
        return tuple(shape)

    def part_shape(self, part: Tensor, rank: int) -> tuple[int, ...]:
        """The shape of what `rank` holds. `part`: what any rank holds."""
        shape = list(part.shape)
        shape[self.dim] = sum(end - first for first, end in self.ranges[rank])
        return tuple(shape)

    def is_owner(self, rank: int) -> bool:
        """Whether no rank before holds the same."""
        return self.ranges.index(self.ranges[rank]) == rank


@dataclass(frozen=True)
class ModelParallel:
    """Attributes:
    group: The ranks that see the same samples.
    everyone: All ranks of the job.
    cuts: By name of a parameter. All ranks of `group` hold the others.
    device_mesh: Of torch, where it is torch's own classes that cut the model.
    traffic: What the parts of the model send to each other in a step of so many micro-batches.
    """

    group: dist.ProcessGroup
    everyone: dist.ProcessGroup
    cuts: Mapping[str, Cut]
    device_mesh: DeviceMesh | None = None
    traffic: Callable[[int], list[Collective]] = field(default=lambda micro_batches: [])

    def expected_traffic(self, micro_batches: int) -> list[Collective]:
        """The same, with the name of the dimension."""
        return [replace(one, dimension=TENSOR) for one in self.traffic(micro_batches)]

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def owned(self, named: Iterable[tuple[str, nn.Parameter]]) -> set[nn.Parameter]:
        """Those that this rank speaks for: of each element of the model, one rank of `group` has it here."""
        return {
            parameter
            for name, parameter in named
            if (self.cuts[name].is_owner(self.rank) if name in self.cuts else self.rank == 0)
        }

    def whole_shapes(self, module: nn.Module) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole model's tensors, by name."""
        state = module.state_dict()
        return {n: self.cuts[n].whole_shape(t) if n in self.cuts else tuple(t.shape) for n, t in state.items()}

    def gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on rank 0 of `group`, nothing elsewhere. `parts`: on CPU, the same names on all. Collective."""
        wholes: dict[str, Tensor] = {}
        for name, part in parts.items():
            cut = self.cuts.get(name)
            if self.rank != 0:
                if cut is not None:
                    dist.send(part.contiguous(), group=self.group, group_dst=0)
                continue
            if cut is None:
                wholes[name] = part
                continue
            whole = wholes[name] = part.new_empty(cut.whole_shape(part))
            cut.put(whole, part, 0)
            for rank in range(1, self.size):
                received = part.new_empty(cut.part_shape(part, rank))
                dist.recv(received, group=self.group, group_src=rank)
                cut.put(whole, received, rank)
        return wholes

    def scattered(self, wholes: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
        """What each rank holds of rank 0's `wholes`, on CPU; the others' are not read. Collective."""
        parts: dict[str, Tensor] = {}
        for name, own in module.state_dict().items():
            cut = self.cuts.get(name)
            for rank in range(1, self.size) if self.rank == 0 else ():
                whole = wholes[name].to(own.dtype).cpu()
                dist.send((cut.part(whole, rank) if cut else whole).contiguous(), group=self.group, group_dst=rank)
            if self.rank == 0:
                parts[name] = cut.part(wholes[name], 0) if cut else wholes[name]
            else:
                shape = cut.part_shape(own, self.rank) if cut else own.shape
                parts[name] = torch.empty(shape, dtype=own.dtype, device="cpu")
                dist.recv(parts[name], group=self.group, group_src=0)
        return parts
