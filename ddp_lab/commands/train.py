"""`ddp-lab train CHOICE`: starts its own ranks. Where a launcher has started it, it is a rank."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from ddp_lab.families import EVERY
from ddp_lab.runtime.cli import OneLineParser, at_least
from ddp_lab.runtime.entrypoint import configured, ranks_here, train_from_command_line
from ddp_lab.runtime.flags import build_parser as build_flags
from ddp_lab.runtime.flags import gives, parse_config
from ddp_lab.runtime.process.launcher import Stopped, adopt_launcher
from ddp_lab.runtime.process.torchrun import quiet_torchrun, start_ranks

ABOUT = "Train a model with one strategy."
PROG = "ddp-lab train"


def build_parser() -> argparse.ArgumentParser:
    parser = build_flags(ABOUT, EVERY.sentences, prog=PROG)
    parser.add_argument("name", metavar="CHOICE", choices=EVERY.names, help="the strategy, in place of --ddp-choice")
    add_ranks(parser)
    return parser


def add_ranks(parser: argparse.ArgumentParser) -> None:
    about = "processes to start on this node (default: one for each GPU, else those of --mesh, or 2)"
    parser.add_argument("--ranks", type=at_least(1), metavar="N", help=about)


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        build_parser().print_help()
        return 0
    finder = OneLineParser(PROG, add_help=False)
    add_ranks(finder)
    options, flags = finder.parse_known_args(arguments)
    if flags and not flags[0].startswith("-"):
        flags = ["--ddp-choice", *flags]
    adopt_launcher(os.environ)
    if not gives(flags, "--ddp-choice", "--config", "--version"):
        finder.error("name a strategy first, as in: ddp-lab train zero3")
    if "RANK" in os.environ:
        return train_from_command_line(ABOUT, EVERY, arguments=flags, prog=PROG)
    config = parse_config(ABOUT, EVERY, arguments=flags, prog=PROG, besides=["--ranks"])
    ranks = options.ranks or ranks_here(config)
    config = configured(config, flags, ranks)
    quiet_torchrun()
    try:
        return 0 if start_ranks(config, ranks, EVERY) else 1
    except Stopped as stopped:
        if not stopped.is_said:
            name = signal.Signals(stopped.number).name
            print(f"error: {config.label}: stopped by {name} before training began", file=sys.stderr)
        return 128 + stopped.number
