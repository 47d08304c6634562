"""What all command lines of this project share: a mistake is answered with one line and exit code 2."""

import argparse
import difflib
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ddp_lab.runtime.errors import leave_as_one, speaks_for_node

Number = TypeVar("Number", int, float)
ROOT = Path(__file__).resolve().parents[2]
"""The folder of the repository, where there is one: an installed wheel has neither benchmarks/ nor tests/."""
TEXTS = ("prompt",)
"""Arguments that are no names of anything, so that they may have several lines."""
UNFIT = ("Cc", "Zl", "Zp", "Cs")
"""Unicode's categories of control characters, of what breaks lines, and of what stands for bytes that are not UTF-8."""


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line, once per node under `torchrun`, and exits with code 2. A name or path that would
    break a line of a message or a record is one, and so is a number that is not of ASCII digits. Flags are written
    out, and a description is printed as it stands."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **settings}
        super().__init__(*args, **settings)
        for kind in (int, float):
            self.register("type", kind, ascii_number(kind))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, remaining = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(options, action.dest, None)
            for text in value if isinstance(value, list) else [value]:
                is_name = isinstance(text, str | Path) and action.dest not in TEXTS
                if is_name and any(unicodedata.category(character) in UNFIT for character in str(text)):
                    name = action.option_strings[0] if action.option_strings else action.dest
                    self.error(f"{name} {str(text)!r}: must be UTF-8, without line breaks or control characters")
        return options, remaining

    def error(self, message: str) -> NoReturn:
        exit_with_error(message + f" (see {self.prog} --help)")


def exit_with_error(message: str) -> NoReturn:
    """Print `message` on standard error, once per node, and exit with code 2."""
    line = "error: " + " ".join(message.splitlines())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if speaks := speaks_for_node():
        print(line, file=sys.stderr, flush=True)
    leave_as_one(line, 2, fails=speaks)
    sys.exit(2)


def require_checkout(command: str) -> None:
    """Leave the process with one line and exit code 2 if there is no repository."""
    if not (ROOT / "benchmarks").is_dir() or not (ROOT / "tests").is_dir():
        exit_with_error(f"ddp-lab {command} needs the repository: clone it, and run this there with uv run")


def versions() -> str:
    """The versions of this project and of torch, which is not imported."""
    return f"ddp-lab {version('ddp-lab')}, torch {version('torch')}"


def unknown_name(noun: str, name: str, names: Iterable[str]) -> str:
    """An error message for a name that is not in `known`, with the nearest names that are."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return f"unknown {noun} '{name}'; {hint}"


def names_of(kind: str, names: Sequence[str]) -> Callable[[str], list[str]]:
    """A type of a flag: names with commas between."""

    def parse_names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in names:
                raise argparse.ArgumentTypeError(unknown_name(kind, name, names))
        return text.split(",")

    return parse_names


def ascii_number(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """`kind`, but for texts with digits of other scripts, which Python takes for the same numbers."""

    def parse_number(text: str) -> Number:
        if not text.isascii():
            raise ValueError(text)
        return kind(text)

    return parse_number


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """A type of a flag: a finite number of this kind."""

    def parse_number(text: str) -> float:
        try:
            number = ascii_number(kind)(text)
        except ValueError:
            number = float("nan")
        if not least <= number < float("inf"):
            adjective = "whole " if kind is int else ""
            raise argparse.ArgumentTypeError(f"{text}: must be a {adjective}number of at least {least}")
        return number

    return parse_number
