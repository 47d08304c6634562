"""What all command lines of this project share: a mistake is answered with one line and exit code 2."""

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import NoReturn

from ddp_lab.runtime.errors import speaks_for_node, tell_torchrun


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line, once per node under `torchrun`, and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        exit_with_error(message + f" (see {self.prog} --help)")


def exit_with_error(message: str) -> NoReturn:
    """Print `message` on standard error, once per node, and exit with code 2."""
    line = f"error: {message}"
    tell_torchrun(line)
    if speaks_for_node():
        print(line, file=sys.stderr, flush=True)
    sys.exit(2)


def versions() -> str:
    """The versions of this project and of torch, which is not imported."""
    return f"ddp-lab {version('ddp-lab')}, torch {version('torch')}"


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """An error message for a name that is not in `known`, with the nearest names that are."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return f"unknown {what} '{name}'; {hint}"


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """A type of a flag: a finite number of this kind."""

    def parse_number(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = float("nan")
        if not least <= number < float("inf"):
            whole = "whole " if kind is int else ""
            raise argparse.ArgumentTypeError(f"{text}: must be a {whole}number of at least {least}")
        return number

    return parse_number
