"""How ranks are arranged."""

from dataclasses import dataclass
from functools import partial

from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.settings.field import flag

_mesh = partial(flag, "mesh")


def canonical_mesh(text: str) -> str:
    """
    Raises:
        UserError: it is no mesh.
    """
    return str(Mesh.parse(text))


@dataclass(frozen=True)
class MeshSettings:
    """The mesh, and how layers are cut over it."""

    mesh: str | None = _mesh(
        None,
        "the ranks by dimension, from the outermost: dp=2,tp=2, or replicate=2,shard=4 (docs/how-it-works/mesh.md; "
        "default: all ranks see different samples)",
        normal=canonical_mesh,
        metavar="DIMENSION=RANKS,...",
    )
    sequence_parallel: bool = _mesh(
        False, "with tp, each rank also keeps only its part of the tokens between attention and MLP"
    )
    async_tensor_parallel: int | None = _mesh(
        None,
        "with --sequence-parallel, cut products into so many pieces, and overlap each with the gather or scatter of "
        "another (docs/how-it-works/tensor_parallel.md; default: no overlap)",
        at_least=2,
    )
    plan: str | None = _mesh(
        None, "with tp, TOML file that says which module is cut how, for models that have no plan here"
    )

    @property
    def cuts_layers(self) -> bool:
        """Whether some ranks see the same samples."""
        return self.mesh is not None and Mesh.parse(self.mesh).model_size > 1
