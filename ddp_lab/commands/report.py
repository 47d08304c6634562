"""`ddp-lab report FOLDER`: the page and the table of a run's traces."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ddp_lab.analysis import command
from ddp_lab.families import report_root_of


def build_parser() -> argparse.ArgumentParser:
    return command.build_parser("ddp-lab report", "ddp-lab report FOLDER [flags]")


def main(arguments: Sequence[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--trace-dir", *arguments]
    options = build_parser().parse_args(arguments)
    folder: Path = options.trace_dir or options.trace_files[0].parent
    return command.report(options, report_root_of(folder.resolve().name))
