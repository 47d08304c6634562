"""The names of the mesh's dimensions, for what a strategy says it sends."""

from collections.abc import Iterable
from dataclasses import replace

from ddp_lab.runtime.mesh import CONTEXT, DATA, DATA_DIMENSIONS, EXPERT, SHARD, Mesh
from ddp_lab.strategy.account import EVERYONE, Collective


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
