"""What a strategy supports of what it may be asked for: one table of refusals for all strategies."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ddp_lab.runtime.errors import UnsupportedError

if TYPE_CHECKING:
    from ddp_lab.runtime.mesh import Mesh
    from ddp_lab.strategy.options import StrategyOptions

Refusal = tuple[Callable[["StrategyOptions"], Any], str]
"""Whether options ask for what a strategy cannot do, and what to say then."""
MeshRefusal = tuple[Callable[["Mesh | None"], Any], str]
"""The same of a mesh."""
NO_REPLICAS = (
    "--mesh with replicate and shard: this strategy cannot shard over a part of the ranks; take zero1, zero2, zero3, "
    "pytorch_zero2 or pytorch_zero3, or --mesh dp=N"
)
NO_EXPERTS = (
    "--mesh with ep: this strategy reduces all gradients over the same ranks; take tp, simple_ddp, zero1, zero2 "
    "or zero3"
)


@dataclass(frozen=True)
class Supports:
    """What a strategy supports of what it may be asked for.

    Attributes:
        compress, compile, param_dtype: Those options.
        offload: The values of `options.offload`; with `:`, a folder may follow them.
        replicas: `options.shard_groups`, and a mesh with `replicate`.
        experts: A mesh with `ep`, where some parameters are held by some of the ranks that share the work.
        refusals, mesh_refusals: What this strategy refuses besides.
    """

    compress: bool = False
    compile: bool = True
    param_dtype: bool = False
    offload: frozenset[str] = frozenset()
    replicas: bool = False
    experts: bool = False
    refusals: tuple[Refusal, ...] = ()
    mesh_refusals: tuple[MeshRefusal, ...] = ()

    def require(self, options: "StrategyOptions") -> None:
        """Check that the strategy can do what `options` ask for."""
        part, colon, _ = (options.offload or "").partition(":")
        takes = {name: getattr(self, name) for name in ("compress", "compile", "param_dtype")}
        takes["offload"] = {part, colon} <= self.offload | {""}
        for field in fields(options):
            value = getattr(options, field.name)
            if value and not takes.get(field.name, True):
                flag = f"--{field.name.replace('_', '-')}" + ("" if value is True else f" {value}")
                raise UnsupportedError(f"{flag}: {field.metadata['unsupported']}")
        if options.shard_groups and not self.replicas:
            raise UnsupportedError(NO_REPLICAS)
        for refuses, message in self.refusals:
            if refuses(options):
                raise UnsupportedError(message)

    def require_mesh(self, mesh: "Mesh | None") -> None:
        """Check that the strategy can train over `mesh`; None: all ranks see different samples."""
        degrees = mesh.degrees if mesh else {}
        if "replicate" in degrees and not self.replicas:
            raise UnsupportedError(NO_REPLICAS)
        if "ep" in degrees and not self.experts:
            raise UnsupportedError(NO_EXPERTS)
        for refuses, message in self.mesh_refusals:
            if refuses(mesh):
                raise UnsupportedError(message)
