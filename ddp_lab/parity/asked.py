"""`ddp-lab parity` asks the runs that it starts to record themselves. It sets environment variables; `HOOK` names the
function that a run calls with its strategy."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from ddp_lab.strategy.registry import HOOK

if TYPE_CHECKING:
    from torch import nn

    from ddp_lab.strategy.strategy import Strategy

VARIABLE = "DDP_LAB_PARITY"
DROPOUT = ("p", "dropout", "dropout_p", "attention_dropout", "attn_dropout", "dropout_prob")
"""Names of attributes that hold a dropout probability, in PyTorch and transformers."""


class Asked(msgspec.Struct, frozen=True):
    """Attributes:
    mesh: Degrees by dimension.
    """

    folder: str
    steps: int
    another_rounding: bool = False
    mesh: dict[str, int] = {}


@contextmanager
def asking(request: Asked) -> Iterator[None]:
    """Ranks that start within this context record themselves."""
    variables = {VARIABLE: msgspec.json.encode(request).decode(), HOOK: "ddp_lab.parity.asked:record"}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def record(strategy: "Strategy") -> None:
    """Record the next steps without dropout: no two runs would draw the same elements."""
    from ddp_lab.parity.recorder import watch

    request = msgspec.json.decode(os.environ[VARIABLE], type=Asked)
    without_dropout(strategy.module)
    watch(strategy, request.folder, request.steps, request.another_rounding).run_facts["mesh"] = request.mesh


def without_dropout(module: "nn.Module") -> None:
    for submodule in module.modules():
        for name in DROPOUT:
            is_of_dropout = name != "p" or "Dropout" in type(submodule).__name__
            if is_of_dropout and isinstance(getattr(submodule, name, None), float):
                setattr(submodule, name, 0.0)
