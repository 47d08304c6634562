"""Flags that several commands of `scripts/plan.py` share, and what they stand for. Imports nothing heavy."""

import argparse
from typing import TYPE_CHECKING

from training.errors import UserError

if TYPE_CHECKING:
    from planner.models import Model

SIZES = ("d_model", "d_ff", "layers")
MORE_SIZES = ("heads", "kv_heads", "vocab")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that name a model: `--model`, or its numbers."""
    parser.add_argument(
        "--model",
        help="published model (from a built-in table, without network), or a local config.json or the folder it is in",
    )
    parser.add_argument("--d-model", type=int, help="instead: width of a Llama's residual stream")
    parser.add_argument("--d-ff", type=int, help="with --d-model: width of its feed-forward layers")
    parser.add_argument("--layers", type=int, help="with --d-model: number of blocks")
    parser.add_argument("--heads", type=int, help="with --d-model: attention heads (default: of 64 features each)")
    parser.add_argument("--kv-heads", type=int, help="with --d-model: heads of keys and values (default: --heads)")
    parser.add_argument("--vocab", type=int, help="with --d-model: tokens in the vocabulary (default: 49152)")


def chosen_model(options: argparse.Namespace) -> "Model":
    """The model that these flags name.

    Raises:
        UserError: they name none, two, or one that cannot be built.
    """
    from planner import models

    if options.model is None:
        return models.from_numbers(*chosen_sizes(options), options.heads, options.vocab, options.kv_heads)
    for size in (*SIZES, *MORE_SIZES):
        if getattr(options, size) is not None:
            raise UserError(f"{flag(size)} is for a model by numbers; it does not go with --model {options.model}")
    return models.find(options.model)


def chosen_sizes(options: argparse.Namespace) -> tuple[int, int, int]:
    """d_model, d_ff and layers.

    Raises:
        UserError: one of them is missing.
    """
    missing = [size for size in SIZES if getattr(options, size) is None]
    if len(missing) == len(SIZES):
        raise UserError("no model: give --model, or --d-model, --d-ff and --layers")
    if missing:
        raise UserError(f"{flag(missing[0])} is missing; a model by numbers needs --d-model, --d-ff and --layers")
    return options.d_model, options.d_ff, options.layers


def require_between(options: argparse.Namespace, name: str, least: float, most: float, unit: str = "") -> None:
    """Refuse a value out of bounds; None is left alone.

    Raises:
        UserError: names flag, value and bounds.
    """
    value = getattr(options, name)
    if value is not None and not least <= value <= most:
        raise UserError(f"{flag(name)} {value:g}: must be from {least:,g} to {most:,g}{unit and ' ' + unit}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
