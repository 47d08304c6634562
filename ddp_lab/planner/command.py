"""What each strategy would need and take on devices that you do not have: its own code, run on tensors without data.

    ddp-lab plan --model SmolLM2-360M --gpus 2xL4 --link pcie4            # all choices, and which to take
    ddp-lab plan search --model SmolLM2-360M --gpus 8xH100 --global-batch-size 512    # which batch, recomputation, mesh
    ddp-lab plan memory --parameters 7.5e9 --ranks 64 --precision mixed   # formulas, term by term
    ddp-lab plan measure --output card.toml                               # what this device reaches, for --gpus

`ddp-lab plan COMMAND --help` lists the flags of a command.
Exit code 0: done. 2: the command line makes no sense, or what it names cannot be used; one line on standard error says
why. 130: stopped by Ctrl-C.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from ddp_lab.planner.costs import hardware
from ddp_lab.planner.flags import COMMANDS
from ddp_lab.progress import long_work
from ddp_lab.runtime.cli import OneLineParser, unknown_name
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.process.environment import prepare_process

DEFAULT = "plan"
WIDTH = 240
"""Characters of the widest table: a file or a pipe has no width of its own."""


def build_parser(command: str = DEFAULT) -> argparse.ArgumentParser:
    parser = OneLineParser(
        "ddp-lab plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    COMMANDS[command][0](parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prepare_process()  # `measure` times operators as runs have them
    command, rest = DEFAULT, list(arguments)
    if rest and not rest[0].startswith("-"):
        command = rest.pop(0)
    if command not in COMMANDS:
        OneLineParser("ddp-lab plan").error(unknown_name("command", command, COMMANDS))
    parser = build_parser(command)
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(unknown_name("argument", unknown[0], known))
    from rich.console import Console

    try:
        if getattr(options, "gpus", None):
            hardware.cluster(options.gpus, options.link, options.between, options.efficiency)
        with long_work("loading torch", shown=getattr(options, "parameters", None) is None):
            module = importlib.import_module(COMMANDS[command][1])
        module.run(options, Console(highlight=False, width=WIDTH))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
