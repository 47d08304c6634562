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
    overlap_optimizer: `options.overlap_optimizer`.
    offload: The values of `options.offload`.
    offload_to_files: That a folder follows them.
    compile: `options.compile_backend`.
    param_dtype: `options.param_dtype`.
    master_dtype: `options.master_dtype`.
    replicas: `options.shard_groups`, and a mesh with `replicate`.
    refusals, mesh_refusals: What this strategy refuses beyond the table.
    """

    compress: bool = False
    overlap_optimizer: bool = False
    offload: frozenset[str] = frozenset()
    offload_to_files: bool = False
    compile: bool = True
    param_dtype: bool = False
    master_dtype: bool = False
    replicas: bool = False
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
        for refuses, message in self.mesh_refusals:
            if refuses(mesh):
                raise UnsupportedError(message)


def _offload(options: "StrategyOptions") -> tuple[str, str]:
    """What is offloaded, and to which folder; empty where there is none."""
    what, _, folder = (options.offload or "").partition(":")
    return what, folder


def _refused_offload(options: "StrategyOptions", supports: Supports) -> str:
    what, _ = _offload(options)
    ways = " or ".join(sorted(supports.offload)) or "nothing"
    others = "zero1, zero2 and zero3" if what == "optimizer" else "zero3, pytorch_zero2 and pytorch_zero3"
    return f"--offload {what}: this strategy can take {ways} off the device; {others} can"


NO_REPLICAS = (
    "--mesh with replicate and shard: this strategy cannot shard over a part of the ranks; take zero1, zero2, zero3, "
    "pytorch_zero2 or pytorch_zero3, or --mesh dp=N"
)
Refusal = tuple[Callable[["StrategyOptions", Supports], Any], str | Callable[["StrategyOptions", Supports], str]]
"""Whether options ask for what is not supported, and what to say then."""
MeshRefusal = tuple[Callable[["Mesh | None"], Any], str]
"""The same of a mesh."""
TABLE: tuple[Refusal, ...] = (
    (
        lambda options, supports: options.compress and not supports.compress,
        "--compress: gradients are compressed by replicated strategies alone",
    ),
    (
        lambda options, supports: options.overlap_optimizer and not supports.overlap_optimizer,
        "--overlap-optimizer: this strategy updates no parameter before all are reduced",
    ),
    (lambda options, supports: options.offload and _offload(options)[0] not in supports.offload, _refused_offload),
    (
        lambda options, supports: _offload(options)[1] and not supports.offload_to_files,
        lambda options, _: (
            f"--offload {options.offload}: this strategy offloads to host memory alone; leave out "
            f":{_offload(options)[1]}, or take zero1, zero2 or zero3"
        ),
    ),
    (
        lambda options, supports: options.compile_backend and not supports.compile,
        "--compile: this strategy has hooks within blocks; take zero1, zero2 or zero3",
    ),
    (
        lambda options, supports: options.param_dtype and not supports.param_dtype,
        "--param-dtype: this strategy computes with the parameters that it updates; take zero1, zero2, zero3, "
        "pytorch_zero2 or pytorch_zero3, or --precision bf16",
    ),
    (
        lambda options, supports: options.master_dtype and not supports.master_dtype,
        "--master-dtype: this strategy updates in the parameters' own dtype; take zero1, zero2 or zero3",
    ),
    (lambda options, supports: options.shard_groups and not supports.replicas, NO_REPLICAS),
)
"""Of all strategies, in the order in which they are checked."""
