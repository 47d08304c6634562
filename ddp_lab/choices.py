"""All strategies that run in a training loop of your own, by name (docs/own-loop.md)."""

from typing import TYPE_CHECKING

import ddp
import sharding
from ddp_lab.runtime.cli import unknown_name

if TYPE_CHECKING:
    from ddp_lab.strategy.strategy import Strategy

CHOICES = tuple(name for name in dict.fromkeys((*ddp.CHOICES, *sharding.CHOICES)) if not name.startswith("deepspeed"))
"""Names of all strategies that run in a loop of your own: DeepSpeed has an engine for that."""


def load(choice: str) -> "type[Strategy]":
    """The class of a strategy.

    Raises:
        KeyError: there is none of this name.
        UserError: what it needs is not installed; says how to install it.
    """
    if choice not in CHOICES and not choice.startswith("deepspeed"):
        raise KeyError(unknown_name("strategy", choice, CHOICES))
    return (ddp if choice in ddp.CHOICES else sharding).load(choice)
