"""Which ranks share what in training one model: the process groups that this rank is in, and more of the same ranks."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_lab.runtime.groups import description
from ddp_lab.runtime.mesh import CONTEXT, DATA, DATA_DIMENSIONS, EXPERT, SHARD, Mesh
from ddp_lab.strategy.account import EVERYONE, Collective
from ddp_lab.strategy.options import StrategyOptions


@dataclass(frozen=True)
class Groups:
    """Attributes:
    work: Ranks that share the work: they see different samples, or different tokens of them.
    everyone: Who trains this model: these, and ranks that hold other parts of it.
    shard: Those of `work` that hold a shard each, all together one copy of the model states.
    copies: Those of `work` that hold the same experts; without experts that are cut, all.
    replicate: Those of `work` that hold the same shard; None if there are no others.
    context_size: Over how many ranks of `work`, neighbours there, the tokens of each sample are cut.
    """

    work: dist.ProcessGroup
    everyone: dist.ProcessGroup
    shard: dist.ProcessGroup
    copies: dist.ProcessGroup
    replicate: dist.ProcessGroup | None = None
    context_size: int = 1

    @classmethod
    def of(cls, work: dist.ProcessGroup, options: StrategyOptions) -> "Groups":
        parts, sharded = options.model_parallel, options.shard_groups
        has_replicas = sharded is not None and dist.get_world_size(sharded.replicate) > 1
        return cls(
            work,
            everyone=parts.everyone if parts else work,
            shard=sharded.shard if sharded else work,
            copies=(parts and parts.copies) or work,
            replicate=sharded.replicate if sharded and has_replicas else None,
            context_size=parts.context_size if parts else 1,
        )

    @property
    def of_experts(self) -> "Groups":
        """Those of parameters that `copies` alone hold."""
        return Groups(self.copies, self.everyone, self.copies, self.copies)

    @property
    def is_first_copy(self) -> bool:
        """Whether no rank before holds the same part of the model."""
        return dist.get_rank(self.copies) == 0

    @property
    def shard_size(self) -> int:
        """Over how many ranks model states are sharded, if they are."""
        return dist.get_world_size(self.shard)

    @property
    def replica(self) -> int:
        """This rank's place among those that hold the same shard."""
        return dist.get_rank(self.replicate) if self.replicate else 0

    @property
    def replicas(self) -> int:
        """How many ranks hold the same shard."""
        return dist.get_world_size(self.replicate) if self.replicate else 1


# The names of the mesh's dimensions, for what a strategy says it sends ------------------------------------------------


def on_mesh(traffic: Iterable[Collective], mesh: Mesh | None) -> list[Collective]:
    """`traffic` with the names of its dimensions on a mesh; without a mesh, of none."""
    return [replace(collective, dimension=dimension_name(collective, mesh) if mesh else "") for collective in traffic]


def dimension_name(collective: Collective, mesh: Mesh) -> str:
    """The name of a collective's dimension. Ranks that differ in one dimension alone are of that dimension. Those that
    differ in `replicate`, `shard` and `cp` are of `dp`; fewer of those that share the work hold shards of one copy."""
    sharing = *DATA_DIMENSIONS, CONTEXT
    dimension = collective.dimension
    if dimension not in ("", EVERYONE):
        return dimension
    if EXPERT in mesh.degrees and collective.group_size == 1:  # an expert that one rank holds
        return DATA
    if dimension == "" and SHARD in mesh.degrees and collective.group_size < mesh.data_size * mesh.degree(CONTEXT):
        return SHARD
    names = [name for name, degree in mesh.degrees.items() if degree > 1 and (dimension or name in sharing)]
    if len(names) == 1:
        return names[0]
    return EVERYONE if set(names) - set(sharing) else DATA


# More groups of the same ranks, for collectives that must not wait for each other -------------------------------------
# Gloo has one connection for each pair of ranks in a group, and sends only what the receiver has announced. With a
# single group, a late rank announces after its own data, and the two directions take turns. So each rank is the root of
# a group of its own.

_device_types_of_gloo: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group sends tensors of this device through Gloo."""
    types = _device_types_of_gloo.get(group)
    if types is None:
        backends = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
        types = _device_types_of_gloo[group] = {kind for kind, backend in backends if backend == "gloo"}
    return device.type in types


_made_of: Counter[str] = Counter()


def another_group(group: dist.ProcessGroup, backend: str, timeout: timedelta | None, purpose: str) -> dist.ProcessGroup:
    """A new group of the same ranks, which only these ranks make. Collective.

    `new_group` names such a group after a count of the groups that this process has made. Counts differ where one rank
    has joined a group that another has not, and ranks that look for each other under two names never meet. So the
    count is lent a number that all members know: `group`'s name, and how many groups were made of it.
    """
    name, count = group.group_name, c10d._world.group_count
    _made_of[name] += 1
    c10d._world.group_count = int.from_bytes(f"{name} {_made_of[name]}".encode())
    try:
        ranks = dist.get_process_group_ranks(group)
        of = description(group)
        new = dist.new_group(
            ranks, timeout, backend, use_local_synchronization=True, group_desc=f"{of}, {purpose}" if of else purpose
        )
    finally:
        c10d._world.group_count = count
    assert isinstance(new, dist.ProcessGroup), "this rank is a member"
    return new


_groups_of_roots: WeakKeyDictionary[dist.ProcessGroup, list[dist.ProcessGroup]] = WeakKeyDictionary()


def groups_of_roots(group: dist.ProcessGroup, device: torch.device) -> list[dist.ProcessGroup]:
    """For each rank, a group of the same ranks that carries only what this rank sends. Collective when first called."""
    if group not in _groups_of_roots:
        ranks, timeout = dist.get_process_group_ranks(group), group._get_backend(device).options._timeout
        _groups_of_roots[group] = [another_group(group, "gloo", timeout, f"root {rank}") for rank in ranks]
    return _groups_of_roots[group]


_side_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def side_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group of the same ranks for small collectives that must not wait for an `all_gather` under way. Collective when
    first called.

    NCCL runs the collectives of a group one after the other, on whatever streams. Over Gloo `group` itself will do,
    because each root has a group of its own.
    """
    if is_gloo(group, device):
        return group
    if group not in _side_groups:
        options = group._get_backend(device).options
        timeout = None if options is None else options._timeout  # torch's `fake` group has none
        _side_groups[group] = another_group(group, dist.get_backend_config(group), timeout, "side")
    return _side_groups[group]
