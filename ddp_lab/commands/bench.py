"""`ddp-lab bench NAME`: starts a program of benchmarks/."""

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_lab.commands.checkout import ROOT, require_checkout
from ddp_lab.runtime.cli import OneLineParser, at_least, unknown_name


def programs() -> dict[str, str]:
    """The first sentence of each program, by name. Empty without a checkout."""
    found = {}
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        text = path.read_text()
        if "__main__" in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
    return found


def build_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name}\n      {sentence}" for name, sentence in programs().items())
    parser = OneLineParser(
        "ddp-lab bench",
        usage="ddp-lab bench NAME [--ranks N] [flags of the program]",
        description="Start a program of benchmarks/; ddp-lab bench NAME --help says what it measures.",
        epilog=f"programs:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=at_least(1), metavar="N", help="start it under torchrun, on so many ranks")
    return parser


def main(arguments: Sequence[str]) -> int:
    require_checkout("bench")
    parser = build_parser()
    if not arguments or arguments[0].startswith("-"):
        parser.parse_args(arguments)
        parser.print_help()
        return 0
    name, *rest = arguments
    if name not in programs():
        parser.error(unknown_name("program", name, programs()))
    finder = OneLineParser("ddp-lab bench", add_help=False, allow_abbrev=False)
    finder.add_argument("--ranks", type=at_least(1))
    options, flags = finder.parse_known_args(rest)
    path: Path = ROOT / "benchmarks" / f"{name}.py"
    launcher = [] if options.ranks is None else ["-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc_per_node={options.ranks}"] * len(launcher[:1])
    if options.ranks is not None:
        print(f"starting {options.ranks} ranks of {path.name}", file=sys.stderr, flush=True)
    one_thread = {"OMP_NUM_THREADS": "1"}  # torchrun's own default, without its notice
    return subprocess.run([sys.executable, *launcher, str(path), *flags], env=one_thread | os.environ).returncode
