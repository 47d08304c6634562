"""`--compile`: each block of a model is compiled by torch.compile, and hooks around it run as they are written.

A block is the unit that strategies gather, free and reduce. Were the whole module one graph, their hooks would lie in
the middle of it. Compiled block by block, they stay between graphs. And equal blocks share one graph, so that compile
time does not grow with depth. A module without blocks is compiled whole.

Only forward passes in training are compiled, with their backward passes. Evaluation and generation run as written:
there, every other batch size would be compiled anew.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn

from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.modules import find_blocks

MOST_COMPILATIONS = 100_000
"""Of which torch keeps figures: the last 64, unless told otherwise."""
VARIANTS = 8
"""How many graphs equal blocks may have, for other shapes and modes: torch's own default."""
NEEDED = "install one (Debian, Ubuntu: apt-get install g++), or train without --compile"


def require_compiler(device: torch.device) -> None:
    """Check that torch.compile can make code for `device` here."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError("--compile: Triton does not work with this GPU; train without --compile")
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            raise UserError(f"--compile: Triton needs a C compiler, and there is none in PATH; {NEEDED}")
        return
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise UserError(f"--compile: on a CPU it needs a C++ compiler, and there is none in PATH; {NEEDED}") from None


class CompiledBlocks:
    """Compiles the blocks of `module` in place. Names of modules and parameters stay.

    Args:
        backend: Of torch.compile: `inductor`, or in tests one that takes less time.
    """

    settling_steps = 2
    """Graphs are made in the first step, forward and backward, and again in the second where shapes have changed."""

    def __init__(self, module: nn.Module, backend: str) -> None:
        from torch._dynamo import utils

        self._utils = utils
        utils.set_compilation_metrics_limit(MOST_COMPILATIONS)
        self._compiled_before = len(utils.get_compilation_metrics())
        self._breaks_before = Counter(utils.counters["graph_break"])
        self.blocks = find_blocks(module) or [module]
        for block in self.blocks:
            compile_forward(block, backend, VARIANTS + len(self.blocks))

    def as_record(self) -> dict[str, Any]:
        """The compilations of this process so far (`docs/run-record.md`)."""
        compilations = self._utils.get_compilation_metrics()[self._compiled_before :]
        forward = [compilation for compilation in compilations if compilation.is_forward]
        breaks = Counter(self._utils.counters["graph_break"]) - self._breaks_before
        return {
            "blocks": len(self.blocks),
            "graphs": sum(1 for compilation in forward if compilation.graph_op_count),
            "recompilations": by_reason(graph.recompile_reason for graph in forward if graph.recompile_reason),
            "graph_breaks": by_reason(breaks.elements()),
            "seconds": round(sum(compilation.duration_us or 0 for compilation in compilations) / 1e6, 3),
        }


def compile_forward(block: nn.Module, backend: str, recompile_limit: int) -> None:
    """Let `block` run compiled in training.

    Not `block.compile()`: that compiles the block's hooks too.

    Args:
        recompile_limit: Graphs that all blocks of one class may have together; the next one runs uncompiled.
    """
    as_written = block.forward
    compiled = torch.compile(as_written, backend=backend, recompile_limit=recompile_limit)  # type: ignore[call-overload]

    @wraps(as_written)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if block.training else as_written)(*args, **kwargs)

    block.forward = forward


def by_reason(reasons: Iterable[str]) -> dict[str, int]:
    """How often each occurs; of those that torch explains at length, the first line."""
    return dict(Counter(" ".join(reason.strip().partition("\n")[0].split()) for reason in reasons))
