"""Which strategies there are to plan, without a mesh or on one."""

from collections.abc import Mapping, Sequence

import ddp
import sharding
import tensor_parallel
from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import EXPERT, SHARD, Mesh
from ddp_lab.strategy.registry import Registry

FAMILIES: Mapping[str, Registry] = {"main_ddp.py": ddp.REGISTRY, "main_shard.py": sharding.REGISTRY}
"""Choices by the entrypoint that trains with them, where the model is not cut."""
CUT = {"main_parallel.py": tensor_parallel.REGISTRY}
"""The same, where it is."""


def families_of(mesh: Mesh | None) -> Mapping[str, Registry]:
    """The choices that a mesh is for, by entrypoint."""
    if mesh is None or (mesh.model_size == 1 and EXPERT not in mesh.degrees):
        return {"main_shard.py": sharding.REGISTRY} if mesh and SHARD in mesh.degrees else FAMILIES
    return CUT


def choices(wanted: Sequence[str] | None = None, meshes: Sequence[Mesh | None] = (None,)) -> list[str]:
    """Choices in display order: all of these meshes, or the wanted ones of them.

    Raises:
        UserError: one does not exist, or goes with none of the meshes.
    """
    existing = names_in(FAMILIES) + names_in(CUT)
    known = list(dict.fromkeys(name for mesh in meshes for name in names_in(families_of(mesh))))
    for name in wanted or ():
        if name not in existing:
            raise UserError(f"--choices: {unknown_name('strategy', name, existing)}")
        if name not in known:
            where = ", ".join(str(mesh) for mesh in meshes if mesh) or "no mesh with tp or pp"
            raise UserError(f"--choices: {name} does not go with {where}; these do: {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]


def names_in(families: Mapping[str, Registry]) -> list[str]:
    return [name for registry in families.values() for name in registry.sentences]


def entrypoint_of(choice: str, mesh: Mesh | None) -> str:
    return next(entrypoint for entrypoint, registry in families_of(mesh).items() if choice in registry.sentences)
