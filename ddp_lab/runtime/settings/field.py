"""A setting: a field of a frozen dataclass, with all that its flag, `--help`, the docs and the checks need to know.

Imports nothing heavy, so that `--help` answers at once.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ddp_lab.runtime.errors import UserError, require

GROUPS = ("model and data", "mesh", "batch", "precision", "memory", "communication", "profiling", "checkpoints", "run")
"""The headings of `--help`, in order."""

Rules = Sequence[tuple[Callable[[Any], bool], str]]
"""What goes with what. In a row: whether settings keep the rule, and what is said if not, as `str.format` takes it."""
T = TypeVar("T")


def flag(
    group: str,
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    at_least: int | None = None,
    above_zero: bool = False,
    read: Callable[[str], Any] | None = None,
    normal: Callable[[str], str] | None = None,
    metavar: str | None = None,
    alone: Any = None,
) -> Any:
    """A field, and its flag.

    Args:
        group: One of `GROUPS`.
        choices: The values that it takes, if they are few.
        at_least: The smallest value. `above_zero`: any finite number above 0.
        read: Reads the value on the command line. Raises `argparse.ArgumentTypeError`. Default: the field's type.
        normal: The form in which a value is kept, wherever it comes from. Raises `UserError`.
        metavar: What stands for the value in `--help`. Default: the choices, or by the field's type.
        alone: The value of the flag when no value follows it. Default: a value must follow.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(settings: Any) -> "list[dataclasses.Field[Any]]":
    """The fields of a dataclass, or of an instance, that are flags."""
    return [field for field in dataclasses.fields(settings) if "group" in field.metadata]


def flag_name(field_name: str) -> str:
    """The flag of a field."""
    return "--ddp-choice" if field_name == "choice" else "--" + field_name.replace("_", "-")


def check(settings: Any, rules: Rules) -> None:
    """Bring the values of a frozen dataclass into their normal form, and check each, and how they go together.

    Raises:
        UserError: names the first that is wrong.
    """
    for field in flags_of(settings):
        value, name, about = getattr(settings, field.name), flag_name(field.name), field.metadata
        if value is None:
            continue
        if about["choices"]:
            require(value in about["choices"], name, value, f"one of {', '.join(about['choices'])}")
        if about["at_least"] is not None:
            require(value >= about["at_least"], name, value, f"a whole number of at least {about['at_least']}")
        if about["above_zero"]:
            require(0 < value < float("inf"), name, value, "a number above 0")
        if about["normal"]:
            object.__setattr__(settings, field.name, about["normal"](value))
    for holds, message in rules:
        if not holds(settings):
            raise UserError(message.format(settings))


def argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """A type of a flag for argparse, of a function that raises `UserError`."""

    def read_argument(text: str) -> T:
        try:
            return read(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_argument


def one_of(known: Iterable[str], text: str, more: str = "") -> None:
    """Check a value of the command line.

    Raises:
        argparse.ArgumentTypeError: `text` is not in `known`. `more`: what else it may have.
    """
    known = tuple(known)
    if text not in known:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(known)}{more}")
