"""The command line of both entrypoints, built from the fields of `RunConfig`."""

import argparse
import dataclasses
import difflib
import os
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from training.config import RunConfig, flag_name
from training.data.workloads import WORKLOADS
from training.errors import UserError
from training.process.environment import prepare_process
from training.registry import Registry


def train_from_command_line(description: str, registry: Registry, choice_flags: tuple[str, ...]) -> int:
    """The whole of an entrypoint: train as the command line says, and answer with the exit code."""
    config = parse_config(description, registry.sentences, choice_flags, missing=registry.missing)
    prepare_process()
    from training.run import run  # imports torch, which --help can do without

    return run(config, registry.load)


class OneLineParser(argparse.ArgumentParser):
    """Answers a mistake with one line (from rank 0 alone under `torchrun`) and exit code 2."""

    def error(self, message: str) -> NoReturn:
        exit_with_error(message + f" (see {Path(sys.argv[0]).name} --help)")


def exit_with_error(message: str) -> NoReturn:
    """Print `message` on standard error, once per run, and leave with exit code 2."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """An error message for a name that is not among `known`, with the nearest ones that are."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return f"unknown {what} '{name}'; {hint}"


def build_parser(
    description: str, choices: Mapping[str, str], choice_flags: tuple[str, ...]
) -> argparse.ArgumentParser:
    """A parser with one flag for each field of `RunConfig`.

    Args:
        description: One sentence for `--help`.
        choices: Strategy names in display order, each with the sentence that `--help` prints.
        choice_flags: The flag that selects the strategy, and its aliases.
    """
    parser = OneLineParser(
        description=description,
        epilog="\n\n".join((_listing("strategies", choices), _listing("workloads", WORKLOADS))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    types_of = typing.get_type_hints(RunConfig)
    for field in dataclasses.fields(RunConfig):
        help_text, default = field.metadata["help"], field.default
        if field.name == "choice":
            parser.add_argument(*choice_flags, dest=field.name, required=True, metavar="NAME", help=help_text)
        elif types_of[field.name] is bool:
            parser.add_argument(flag_name(field.name), action="store_true", help=help_text)
        else:
            shown = "" if default is None else f" (default: {default})"
            value_type = field.metadata["parse"] or _plain_type(types_of[field.name])
            parser.add_argument(
                flag_name(field.name),
                type=value_type,
                default=default,
                metavar=value_type.__name__.upper(),
                **({} if field.metadata["alone"] is None else {"nargs": "?", "const": field.metadata["alone"]}),
                help=help_text + shown,
            )
    return parser


def parse_config(
    description: str,
    choices: Mapping[str, str],
    choice_flags: tuple[str, ...],
    arguments: list[str] | None = None,
    missing: Mapping[str, str] | None = None,
) -> RunConfig:
    """The settings that the command line asks for; leaves the process with one line where they make no sense.

    Args:
        arguments: Default: the command line.
        missing: For choices that are not installed, the command that installs them.
    """
    parser = build_parser(description, choices, choice_flags)
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        known_flags = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(unknown_name("argument", unknown[0], known_flags))
    if values.choice not in choices:
        parser.error(unknown_name("strategy", values.choice, choices))
    if missing and values.choice in missing:
        exit_with_error(f"strategy '{values.choice}' is not installed; run: {missing[values.choice]}")
    if values.workload != "auto" and values.workload not in WORKLOADS:
        parser.error(unknown_name("workload", values.workload, WORKLOADS))
    try:
        return RunConfig(**vars(values))
    except UserError as error:
        parser.error(str(error))


def _listing(title: str, entries: Mapping[str, str]) -> str:
    width = max(map(len, entries), default=0)
    return "\n".join([f"{title}:"] + [f"  {name:<{width}}  {sentence}" for name, sentence in entries.items()])


def _plain_type(annotation: object) -> type:
    if isinstance(annotation, types.UnionType):
        (annotation,) = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    assert isinstance(annotation, type)
    return annotation
