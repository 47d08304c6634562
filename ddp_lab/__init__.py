"""The strategies for training loops of your own (docs/own-loop.md).

    strategy = ddp_lab.load("zero3")(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))

An installed ddp-lab also brings the packages `ddp`, `sharding`, `reference` and `training`, which hold its code.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import training

if Path(training.__file__).parents[1] != Path(__file__).parents[1]:
    raise ImportError(
        f"{training.__file__} hides ddp-lab's package of the same name: rename yours, or put ddp-lab first in sys.path"
    )

import ddp
import sharding
from training.checkpoint.of_strategy import load_checkpoint, save_checkpoint
from training.cli import unknown_name
from training.config import StrategyOptions
from training.errors import NonFiniteError, UnsupportedError

if TYPE_CHECKING:
    from training.strategy import Strategy

CHOICES = tuple(name for name in dict.fromkeys((*ddp.CHOICES, *sharding.CHOICES)) if not name.startswith("deepspeed"))
"""Names of all strategies that run in a loop of your own: DeepSpeed has an engine for that."""

__all__ = [
    "CHOICES",
    "NonFiniteError",
    "StrategyOptions",
    "UnsupportedError",
    "load",
    "load_checkpoint",
    "save_checkpoint",
]


def load(choice: str) -> "type[Strategy]":
    """The class of a strategy.

    Raises:
        KeyError: there is none of this name.
        UserError: what it needs is not installed; says how to install it.
    """
    if choice not in CHOICES and not choice.startswith("deepspeed"):
        raise KeyError(unknown_name("strategy", choice, CHOICES))
    return (ddp if choice in ddp.CHOICES else sharding).load(choice)
