"""Flags as text: the command line of all entrypoints, built from the fields of `RunConfig`, and TOML files, in which a
key is the name of a flag without its leading dashes: `ddp-choice = "zero3"`, `max-steps = 40`, `no-profile = true`."""

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_lab.runtime.cli import OneLineParser, exit_with_error, unknown_name, versions
from ddp_lab.runtime.config import FLAGS, RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.process.launcher import without_local_rank
from ddp_lab.runtime.settings.data import WORKLOADS
from ddp_lab.runtime.settings.field import GROUPS, argument, flag_name, kind_of
from ddp_lab.strategy.registry import Registry

ENTRYPOINTS = {"main_ddp.py": "ddp", "main_shard.py": "sharding", "main_parallel.py": "tensor_parallel"}
"""Each with the package whose choices it trains."""

UNDER_TORCHRUN = "torchrun --standalone --nproc_per_node=RANKS %(prog)s --ddp-choice NAME [flags]"
METAVARS: dict[object, str] = {int: "N", float: "X", str: "TEXT"}


def parse_config(
    description: str,
    registry: Registry,
    aliases: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
    prog: str | None = None,
    besides: Sequence[str] = (),
) -> RunConfig:
    """The settings of the command line. Exits with one line where they make no sense.

    `prog` is the command if it starts its own ranks, instead of an entrypoint that `torchrun` starts. `besides`: flags
    that the command takes itself, which a mistyped one may have meant.
    """
    parser = build_parser(description, registry.sentences, aliases, prog)
    try:
        arguments = with_config_file(without_local_rank(sys.argv[1:] if arguments is None else arguments))
        values, unknown = parser.parse_known_args(arguments)
        if unknown:
            known_flags = [flag for action in parser._actions for flag in action.option_strings]
            parser.error(unknown_name("argument", unknown[0], [*besides, *known_flags]))
        if values.choice not in registry.sentences:
            parser.error(_unknown_strategy(values.choice, registry))
        if values.choice in registry.missing:
            exit_with_error(f"strategy '{values.choice}' is not installed; run: {registry.missing[values.choice]}")
        return RunConfig.of(**{field.name: getattr(values, field.name) for field in FLAGS})
    except UserError as error:
        parser.error(str(error))


def _unknown_strategy(name: str, registry: Registry) -> str:
    for entrypoint, package in ENTRYPOINTS.items():
        if name in importlib.import_module(package).REGISTRY.sentences:
            return f"strategy '{name}' is one of {entrypoint}; run that instead"
    return unknown_name("strategy", name, registry.sentences)


def build_parser(
    description: str, choices: Mapping[str, str], aliases: Sequence[str] = (), prog: str | None = None
) -> argparse.ArgumentParser:
    """A parser with one flag for each field of `RunConfig`. `choices`: strategies in display order, with a sentence
    each."""
    parser = OneLineParser(
        prog,
        "%(prog)s CHOICE [--ranks N] [flags]" if prog else UNDER_TORCHRUN,
        description=description,
        epilog="\n\n".join((_listing("strategies", choices), _listing("workloads", WORKLOADS))),
        add_help=False,
    )
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for field in FLAGS:
        _add_flag(groups[field.metadata["group"]], field, field.default, aliases if field.name == "choice" else ())
    run = groups["run"]
    run.add_argument("--config", metavar="FILE", help="TOML file of flags; those on the command line win")
    run.add_argument("-h", "--help", action="help", help="print this and stop")
    run.add_argument(
        "--version", action="version", version=versions(), help="print the versions of this project and of torch"
    )
    return parser


def add_flags(parser: argparse.ArgumentParser, names: Collection[str], **defaults: Any) -> None:
    """Give another program some of these flags. They mean the same there."""
    for field in FLAGS:
        if field.name in names:
            _add_flag(parser, field, defaults.get(field.name, field.default))


def _add_flag(group: Any, field: "dataclasses.Field[Any]", default: Any, aliases: Sequence[str] = ()) -> None:
    flag, about = flag_name(field.name), field.metadata
    if field.type is bool:
        opposite = flag.replace("--no-", "--") if flag.startswith("--no-") else flag.replace("--", "--no-", 1)
        group.add_argument(flag, opposite, dest=field.name, action=_Switch, default=False, help=about["help"])
        return
    choices = "{" + ",".join(about["choices"]) + "}" if about["choices"] else None
    read = argument(about["normal"]) if about["normal"] else kind_of(field)
    group.add_argument(
        flag,
        *aliases,
        dest=field.name,
        type=read,
        default=default,
        required=field.name == "choice",
        metavar=about["metavar"] or choices or METAVARS.get(read, "TEXT"),
        **({} if about["alone"] is None else {"nargs": "?", "const": about["alone"]}),
        help=about["help"] + (f" (default: {default})" if default not in (None, "") else ""),
    )


class _Switch(argparse.Action):
    """A flag without a value, and its opposite, which overrides a file."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


def _listing(title: str, entries: Mapping[str, str]) -> str:
    width = max(map(len, entries), default=0)
    return "\n".join([f"{title}:"] + [f"  {name:<{width}}  {sentence}" for name, sentence in entries.items()])


# Files and lists of flags --------------------------------------------------------------------------------------------


def with_config_file(arguments: Sequence[str], ignored: Collection[str] = ()) -> list[str]:
    """`arguments`, in front of them the flags of the file that `--config` names, so that `arguments` win."""
    finder = OneLineParser(add_help=False)
    finder.add_argument("--config", type=Path)
    options, remaining = finder.parse_known_args(arguments)
    return remaining if options.config is None else [*_flags_in(options.config, ignored), *remaining]


def _flags_in(path: Path, ignored: Collection[str]) -> list[str]:
    import msgspec

    from ddp_lab.untrusted import settings_in

    content = settings_in(path, "--config")
    kinds = {_key(field.name): field.type for field in FLAGS}
    flags = []
    for key, value in content.items():
        if key not in kinds:
            raise UserError(f"--config {path}: {unknown_name('key', key, kinds)}")
        try:
            msgspec.convert(value, kinds[key])
        except msgspec.ValidationError as error:
            raise UserError(f"--config {path}: {key}: {error}") from error
        if key not in ignored and value is not False:
            flags.append(f"--{key}" if value is True else f"--{key}={value}")
    return flags


def to_toml(config: RunConfig, comment: str) -> str:
    """A file for `--config` with all settings of a run, without those that are None."""
    import tomli_w

    content = {_key(name): value for name, value in config.as_dict().items() if value is not None}
    return f"# {comment}\n{tomli_w.dumps(content)}"


def _key(field_name: str) -> str:
    return flag_name(field_name).removeprefix("--")


def to_flags(config: RunConfig) -> list[str]:
    """The command line of a run with these settings."""
    values = config.as_dict()
    flags = [f"{flag_name(field.name)}={values[field.name]}" for field in FLAGS if values[field.name] != field.default]
    return [*(flag.removesuffix("=True") for flag in flags), f"--global-batch-size={config.global_batch_size}"]


def gives(arguments: Sequence[str], *names: str) -> bool:
    """Whether one of these flags is among them."""
    return any(argument.partition("=")[0] in names for argument in arguments)
