"""What a strategy supports of what it may be asked for: one table of refusals for all strategies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_lab.runtime.errors import UnsupportedError

if TYPE_CHECKING:
    from ddp_lab.runtime.mesh import Mesh
    from ddp_lab.strategy.options import StrategyOptions


@dataclass(frozen=True)
class Supports:
    """Attributes:
    compress: `options.compress`.
    offload: The values of `options.offload`.
    offload_to_files: That a folder follows them.
    compile: `options.compile_backend`.
    param_dtype: `options.param_dtype`.
    replicas: `options.shard_groups`, and a mesh with `replicate`.
    experts: A mesh with `ep`, where some parameters are held by some of the ranks that share the work.
    refusals, mesh_refusals: What this strategy refuses beyond the table.
    """

    compress: bool = False
    offload: frozenset[str] = frozenset()
    offload_to_files: bool = False
    compile: bool = True
    param_dtype: bool = False
    replicas: bool = False
    experts: bool = False
    refusals: "tuple[Refusal, ...]" = ()
    mesh_refusals: "tuple[MeshRefusal, ...]" = ()

    def require(self, options: "StrategyOptions") -> None:
        """Check that the strategy can do what `options` ask for.

        Raises:
            UnsupportedError: names the flag that it cannot.
        """
        for refuses, message in (*TABLE, *self.refusals):
            if refuses(options, self):
                raise UnsupportedError(message(options, self) if callable(message) else message)

    def require_mesh(self, mesh: "Mesh | None") -> None:
        """Check that the strategy can train over `mesh`; None: all ranks see different samples.

        Raises:
            UnsupportedError: says what it needs.
        """
        if mesh is not None and "replicate" in mesh.degrees and not self.replicas:
            raise UnsupportedError(NO_REPLICAS)
        if mesh is not None and "ep" in mesh.degrees and not self.experts:
            raise UnsupportedError(NO_EXPERTS)
        for refuses, message in self.mesh_refusals:
            if refuses(mesh):
                raise UnsupportedError(message)


def _refused_offload(options: "StrategyOptions", supports: Supports) -> str:
    what = options.offloaded
    ways = " or ".join(sorted(supports.offload)) or "nothing"
    others = "zero1, zero2 and zero3" if what == "optimizer" else "zero3, pytorch_zero2 and pytorch_zero3"
    return f"--offload {what}: this strategy can take {ways} off the device; {others} can"


def _refused_folder(options: "StrategyOptions", supports: Supports) -> str:
    return (
        f"--offload {options.offload}: this strategy offloads to host memory alone; leave out "
        f":{str(options.offload).partition(':')[2]}, or take zero1, zero2 or zero3"
    )


NO_REPLICAS = (
    "--mesh with replicate and shard: this strategy cannot shard over a part of the ranks; take zero1, zero2, zero3, "
    "pytorch_zero2 or pytorch_zero3, or --mesh dp=N"
)
NO_EXPERTS = (
    "--mesh with ep: this strategy reduces all gradients over the same ranks; take tp, simple_ddp, zero1, zero2 "
    "or zero3"
)
NO_CAST = (
    "--param-dtype: this strategy computes with the parameters that it updates; take zero1, zero2, zero3, "
    "pytorch_zero2 or pytorch_zero3, or --precision bf16"
)
Refusal = tuple[Callable[["StrategyOptions", Supports], Any], str | Callable[["StrategyOptions", Supports], str]]
"""Whether options ask for what is not supported, and what to say then."""
MeshRefusal = tuple[Callable[["Mesh | None"], Any], str]
"""The same of a mesh."""
TABLE: tuple[Refusal, ...] = (
    (lambda o, can: o.compress and not can.compress,
     "--compress: gradients are compressed by replicated strategies alone"),
    (lambda o, can: o.offload and o.offloaded not in can.offload, _refused_offload),
    (lambda o, can: o.offload and o.offload.partition(":")[2] and not can.offload_to_files, _refused_folder),
    (lambda o, can: o.compile_backend and not can.compile,
     "--compile: this strategy has hooks within blocks; take zero1, zero2 or zero3"),
    (lambda o, can: o.param_dtype and not can.param_dtype, NO_CAST),
    (lambda o, can: o.shard_groups and not can.replicas, NO_REPLICAS),
)  # fmt: skip
"""Of all strategies, in the order in which they are checked."""
