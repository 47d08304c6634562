"""Which ranks share what in training one model: the process groups that this rank is in."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch.distributed as dist

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
    return [replace(one, dimension=dimension_name(one, mesh) if mesh else "") for one in traffic]


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
