"""The strategies for training loops of your own (docs/own-loop.md). This is the public door: what lies below may move.

    strategy = ddp_lab.load("zero3")(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))

Names are imported when they are asked for, so that reading traces with `ddp_lab.analysis` does not load torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from context_parallel.own_loop import context_parallel
    from ddp_lab.choices import CHOICES, load
    from ddp_lab.runtime.checkpoint.of_strategy import load_checkpoint, save_checkpoint
    from ddp_lab.runtime.data.workload import Workload
    from ddp_lab.runtime.errors import NonFiniteError, UnsupportedError
    from ddp_lab.strategy.options import StrategyOptions
    from pipeline_parallel.own_loop import pipeline

if sys.version_info < (3, 11):  # noqa: UP036 - a clone is started without pip
    sys.exit("error: ddp-lab needs Python 3.11 to 3.13, and this is {}.{}".format(*sys.version_info))

__all__ = [
    "CHOICES",
    "NonFiniteError",
    "StrategyOptions",
    "UnsupportedError",
    "Workload",
    "context_parallel",
    "load",
    "load_checkpoint",
    "pipeline",
    "save_checkpoint",
]

_HOMES = {
    "CHOICES": "ddp_lab.choices",
    "load": "ddp_lab.choices",
    "NonFiniteError": "ddp_lab.runtime.errors",
    "UnsupportedError": "ddp_lab.runtime.errors",
    "Workload": "ddp_lab.runtime.data.workload",
    "StrategyOptions": "ddp_lab.strategy.options",
    "context_parallel": "context_parallel.own_loop",
    "pipeline": "pipeline_parallel.own_loop",
    "load_checkpoint": "ddp_lab.runtime.checkpoint.of_strategy",
    "save_checkpoint": "ddp_lab.runtime.checkpoint.of_strategy",
}


def __getattr__(name: str) -> Any:
    if name == "parity":
        return importlib.import_module("ddp_lab.parity")
    if name not in _HOMES:
        raise AttributeError(f"module 'ddp_lab' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
