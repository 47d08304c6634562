"""The ranks of a job, arranged in dimensions: `--mesh dp=2,tp=4` is two models, each cut over four ranks.
`Mesh` is arithmetic. `MeshGroups` are its process groups.

Dimensions are named from the outermost to the innermost, whose ranks have consecutive numbers: they are on one node.

- `dp`, or `replicate` and `shard`: ranks that see different samples. A data-parallel strategy runs over them. With
  `replicate` and `shard` it shards over the one and replicates over the other (HSDP).
- `ep`: ranks that see different samples, too, and hold each some experts of a mixture (`expert_parallel`). Ranks that
  differ in `dp` alone hold the same experts.
- `pp`: ranks that see the same samples, and hold each a stage, some layers of the model (`pipeline_parallel`).
- `cp`: ranks that see the same samples, each a part of their tokens (`context_parallel`). Each makes a part of the
  gradient, so a data-parallel strategy runs over them, too.
- `tp`: ranks that see the same samples, and hold each a part of the layers (`tensor_parallel`).
"""

import gc
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from ddp_lab.runtime.errors import UserError

if TYPE_CHECKING:  # --help does without torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

DATA, REPLICATE, SHARD, EXPERT = "dp", "replicate", "shard", "ep"
PIPELINE, CONTEXT, TENSOR = "pp", "cp", "tp"
DIMENSIONS = (DATA, REPLICATE, SHARD, EXPERT, PIPELINE, CONTEXT, TENSOR)
"""The outermost first."""
DATA_DIMENSIONS = (DATA, REPLICATE, SHARD, EXPERT)
EXAMPLE = "dp=2,tp=2"


@dataclass(frozen=True)
class Mesh:
    """`degrees`: the number of ranks along each dimension, from the outermost to the innermost."""

    degrees: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """The dimensions may stand in any order."""
        degrees: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            if name not in DIMENSIONS:
                raise UserError(f"--mesh {text}: '{name}' is none of {', '.join(DIMENSIONS)}; write {EXAMPLE}")
            if not (re.fullmatch("[0-9]{1,9}", number) and int(number) > 0):
                raise UserError(f"--mesh {text}: {name} must be a whole number of ranks, at least 1; write {EXAMPLE}")
            if name in degrees:
                raise UserError(f"--mesh {text}: {name} is there twice")
            degrees[name] = int(number)
        if DATA in degrees and degrees.keys() & {REPLICATE, SHARD}:
            raise UserError(f"--mesh {text}: either {DATA}, or {REPLICATE} and {SHARD}")
        if REPLICATE in degrees and SHARD not in degrees:
            raise UserError(f"--mesh {text}: {REPLICATE} goes with {SHARD}; without it, write {DATA}")
        return cls({name: degrees[name] for name in DIMENSIONS if name in degrees})

    @classmethod
    def of_label(cls, label: str) -> "Mesh":
        """The mesh that has this `label`, which may have a suffix: `dp2-tp2-sp`, `pp2-interleaved4`."""
        matches = re.findall(rf"\b({'|'.join(DIMENSIONS)})(\d+)", label)
        return cls({name: int(degree) for name, degree in matches})

    def __str__(self) -> str:
        return ",".join(f"{name}={degree}" for name, degree in self.degrees.items())

    @property
    def label(self) -> str:
        """For names of folders: `dp2-tp2`."""
        return "-".join(f"{name}{degree}" for name, degree in self.degrees.items())

    def degree(self, name: str) -> int:
        return self.degrees.get(name, 1)

    @cached_property
    def size(self) -> int:
        return prod(self.degrees.values())

    @property
    def has_parts(self) -> bool:
        """Whether a dimension has some of the ranks, neither one nor all."""
        return any(1 < degree < self.size for degree in self.degrees.values())

    @cached_property
    def data_size(self) -> int:
        """How many ranks see different samples."""
        return prod(self.degree(name) for name in DATA_DIMENSIONS)

    @cached_property
    def model_size(self) -> int:
        """How many ranks see the same samples."""
        return self.size // self.data_size

    def data_rank(self, rank: int) -> int:
        """The number of a rank among those that see different samples."""
        return rank // self.model_size

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along each dimension."""
        places = {}
        for name, degree in reversed(list(self.degrees.items())):
            rank, places[name] = divmod(rank, degree)
        return dict(reversed(places.items()))

    def describe(self, rank: int) -> str:
        """The same as text: `dp 1, tp 0`."""
        return ", ".join(f"{name} {place}" for name, place in self.coordinates(rank).items())

    def require_ranks(self, world_size: int, ranks_per_node: int) -> None:
        """Refuse a job with another number of ranks, and an innermost dimension that does not stay within a node,
        unless it is `dp`, `pp` or `cp`."""
        if self.size != world_size:
            product = " x ".join(map(str, self.degrees.values()))
            raise UserError(
                f"--mesh {self} has {product} = {self.size} ranks, and the job has {world_size}; change a degree, or "
                f"start {self.size} ranks"
            )
        name, degree = list(self.degrees.items())[-1]
        if name not in (DATA, PIPELINE, CONTEXT) and ranks_per_node % degree:
            raise UserError(
                f"--mesh {self}: the {degree} ranks of {name}, the innermost dimension, do not stay within nodes of "
                f"{ranks_per_node} ranks; take a degree that divides {ranks_per_node}"
            )

    def picture(self, ranks_per_node: int) -> str:
        """The ranks in a table: a row for each place in the outer dimensions, the innermost from left to right."""
        *outer, (inner, degree) = self.degrees.items()
        width = len(str(self.size - 1))
        lines = []
        for first in range(0, self.size, degree):
            place = ", ".join(f"{name} {where}" for name, where in self.coordinates(first).items() if name != inner)
            numbers = "  ".join(f"{rank:>{width}}" for rank in range(first, first + degree))
            lines.append((place, numbers, f"node {first // ranks_per_node}"))
        names = max(len(place) for place, _, _ in lines)
        head = f"{'':<{names}}  {inner} 0 to {degree - 1}" if degree > 1 else ""
        rows = [f"{place:<{names}}  {numbers}   {node}" for place, numbers, node in lines]
        return "\n".join(line.rstrip() for line in [f"mesh {self}, ranks:", *([head] if outer and head else []), *rows])


@dataclass(frozen=True)
class ShardGroups:
    """Where some ranks alone share model states: ranks that hold a shard each, and those that hold the same."""

    shard: "dist.ProcessGroup"
    replicate: "dist.ProcessGroup"


@dataclass(frozen=True)
class MeshGroups:
    """The process groups of this rank.

    Attributes:
        data: Ranks that see different samples, or different tokens of them, and hold the same part of the model.
        model: Ranks that see the same tokens.
        context: Those of `data` that see the same samples.
        expert, copies: With `ep`, those of `data` that hold different experts, and those that hold the same.
        experts: With `ep`, the ranks that hold parts of the experts of one model: along `ep` and `tp`.
        shard, replicate: With these dimensions, the parts of `data` along them; else None. `cp` is in `shard`.
        everyone: All ranks of the mesh.
        no_parts: Why there can be no groups of some of the ranks; empty if there can.
    """

    mesh: Mesh
    device_mesh: "DeviceMesh"
    data: "dist.ProcessGroup"
    model: "dist.ProcessGroup"
    tensor: "dist.ProcessGroup"
    context: "dist.ProcessGroup"
    everyone: "dist.ProcessGroup"
    pipeline: "dist.ProcessGroup | None" = None
    shard: "dist.ProcessGroup | None" = None
    replicate: "dist.ProcessGroup | None" = None
    expert: "dist.ProcessGroup | None" = None
    copies: "dist.ProcessGroup | None" = None
    experts: "dist.ProcessGroup | None" = None
    no_parts: str = ""
    _parts: "dict[int, dist.ProcessGroup]" = field(default_factory=dict)

    @property
    def shard_groups(self) -> ShardGroups | None:
        """For `StrategyOptions`; None if the mesh does not say over which ranks model states are sharded."""
        return ShardGroups(self.shard, self.replicate) if self.shard and self.replicate else None

    def part_of_tensor(self, size: int) -> "dist.ProcessGroup":
        """Of each `size` neighbours in `tensor`, those that this rank is among. All ranks of the mesh call it.

        Raises:
            UserError: `no_parts`.
        """
        import torch.distributed as dist

        if self.no_parts and size < self.mesh.size:
            raise UserError(self.no_parts)
        if size not in self._parts:
            parts = self.device_mesh.mesh.reshape(-1, size).tolist()  # tp is the innermost dimension
            group, _ = dist.new_subgroups_by_enumeration(parts, timeout_of(self.everyone))
            assert isinstance(group, dist.ProcessGroup), "each rank is in one of them"
            self._parts[size] = group
        return self._parts[size]


def timeout_of(group: "dist.ProcessGroup") -> timedelta:
    """How long a collective of `group` may wait for a missing rank."""
    return group._get_backend(group._device_types[-1]).options._timeout


@contextmanager
def mesh_groups(mesh: Mesh, device_type: str, no_parts: str = "") -> Iterator[MeshGroups]:
    """Within this context the groups of a mesh of all ranks exist (`open_groups`). Collective."""
    with closing_groups():
        yield open_groups(mesh, device_type, no_parts)


@contextmanager
def closing_groups() -> Iterator[None]:
    """Groups that are opened within this context end with it."""
    import torch.distributed as dist

    from ddp_lab.runtime.groups import description

    before = set(dist.distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        for group in set(dist.distributed_c10d._world.pg_map) - before:
            is_channel = description(group).startswith("stage ")
            if (
                is_channel or group.size() < dist.get_world_size()
            ):  # others may have been made of the group of all ranks
                dist.destroy_process_group(group)
        if "torch.distributed.tensor" in sys.modules:  # it takes a mesh of these for any later one of the same shape
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()
        gc.collect()  # Gloo's threads end with the last object that holds their group, perhaps a circle of them


def open_groups(mesh: Mesh, device_type: str, no_parts: str = "") -> MeshGroups:
    """The groups of a mesh of all ranks. Collective.

    All meshes have a data dimension, cp and tp here, even of one rank, so that nobody must ask which there are.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if no_parts and mesh.has_parts:
        raise UserError(no_parts)
    everyone = dist.group.WORLD
    assert everyone is not None, "join the process group first"
    # one dimension of torch's mesh for each of ours
    degrees = dict(mesh.degrees)
    if not degrees.keys() & {DATA, SHARD}:
        degrees = {DATA: 1, **degrees}
    tensor = degrees.pop(TENSOR, 1)
    degrees |= {CONTEXT: degrees.get(CONTEXT, 1), TENSOR: tensor}
    device_mesh = init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    parts = {name: device_mesh.get_group(name) for name in degrees}

    def along(dimensions: tuple[str, ...]) -> dist.ProcessGroup:
        """Ranks that differ in these dimensions alone."""
        names = tuple(name for name in degrees if name in dimensions and (name, degrees[name]) != (CONTEXT, 1))
        return parts[names[0]] if len(names) == 1 else device_mesh[names]._flatten("_".join(names)).get_group()

    # groups along several dimensions
    data, model = along((*DATA_DIMENSIONS, CONTEXT)), along((PIPELINE, TENSOR))
    shard = along((SHARD, CONTEXT)) if SHARD in degrees else None
    copies, experts = parts.get(EXPERT), parts.get(EXPERT)
    if EXPERT in degrees:
        copies, experts = along((DATA, CONTEXT)), along((EXPERT, TENSOR)) if tensor > 1 else experts
    # all of them wait as long as the default group
    timeout = timeout_of(everyone)  # new groups have torch's default
    for group in {*parts.values(), data, model, shard, copies, experts} - {everyone, None}:
        dist.set_timeout(timeout, group)
    cut = model, parts[TENSOR], parts[CONTEXT], everyone, parts.get(PIPELINE)
    groups = shard, parts.get(REPLICATE), parts.get(EXPERT), copies, experts
    return MeshGroups(mesh, device_mesh, data, *cut, *groups, no_parts)
