"""What a strategy says it sends: the unit of its communication formula."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from ddp_lab.runtime.mesh import DATA, DATA_DIMENSIONS, SHARD, Mesh

EVERYONE = "mesh"
"""In the place of a dimension: all ranks of the mesh."""


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and purpose that one rank issues in one optimizer step.

    Attributes:
        kind: `all_reduce`, `broadcast`, `reduce`, `all_gather`, `reduce_scatter`, `scatter` or `all_to_all`.
        count: Number of calls.
        payload_bytes: Bytes of all `count` calls together. As in nccl-tests, the size of a call is the tensor for
            all-reduce, broadcast and reduce, and the whole (gathered or scattered) tensor for the others.
        group_size: Ranks in the process group.
        purpose: `gradients`, `parameters`, `activations`, `buffers` or `bookkeeping`.
        dimension: Of the mesh, over whose ranks they are: empty for those that see different samples, or `EVERYONE`.
    """

    kind: str
    count: int
    payload_bytes: int
    group_size: int
    purpose: str
    dimension: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends on average: the least that each kind needs (nccl-tests, PERFORMANCE.md)."""
        others, size = self.group_size - 1, self.group_size
        share = {"all_reduce": 2 * others / size, "scatter": others / size**2}.get(self.kind, others / size)
        return self.payload_bytes * share

    def as_dict(self) -> dict[str, str | int | float]:
        return {**asdict(self), "wire_bytes": self.wire_bytes}


def on_mesh(traffic: Iterable[Collective], mesh: Mesh | None) -> list[Collective]:
    """`traffic` with the names of its dimensions on a mesh; without a mesh, of none."""
    return [replace(one, dimension=dimension_name(one, mesh) if mesh else "") for one in traffic]


def dimension_name(collective: Collective, mesh: Mesh) -> str:
    """The name of a collective's dimension. Ranks that differ in one dimension alone are of that dimension. Those that
    differ in `replicate` and `shard` are of `dp`; fewer of those that see different samples hold shards of one copy."""
    dimension = collective.dimension
    if dimension not in ("", EVERYONE):
        return dimension
    if dimension == "" and SHARD in mesh.degrees and collective.group_size < mesh.data_size:
        return SHARD
    names = [name for name, degree in mesh.degrees.items() if degree > 1 and (dimension or name in DATA_DIMENSIONS)]
    if len(names) == 1:
        return names[0]
    return EVERYONE if set(names) - set(DATA_DIMENSIONS) else DATA
