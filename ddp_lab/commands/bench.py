"""`ddp-lab bench NAME`: runs a program of benchmarks/ on its own ranks. Where a launcher started it, it is a rank."""

import argparse
import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence

from ddp_lab.runtime.cli import ROOT, OneLineParser, at_least, require_checkout, unknown_name
from ddp_lab.runtime.process.environment import prepare_process
from ddp_lab.runtime.process.launcher import adopt_launcher

ALONE = ("aa", "planner", "publish")
"""Programs that need no ranks, or start runs of their own."""


def programs() -> dict[str, str]:
    """The first sentence of each program, by name. Empty without a checkout."""
    sentences = {}
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        text = path.read_text()
        if "def main(" in text:
            sentences[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
    return sentences


def build_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name}\n      {sentence}" for name, sentence in programs().items())
    parser = OneLineParser(
        "ddp-lab bench",
        usage="ddp-lab bench NAME [--ranks N] [flags of the program]",
        description="Run a program of benchmarks/; ddp-lab bench NAME --help says what it measures.",
        epilog=f"programs:\n{listing}",
        add_help=False,  # the help of a program says more
    )
    about = "processes to start on this node (default: 2)"
    parser.add_argument("--ranks", type=at_least(1), default=2, metavar="N", help=about)
    return parser


def main(arguments: Sequence[str]) -> int:
    require_checkout("bench")
    parser = build_parser()
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    name, *flags_of_program = arguments
    if name not in programs():
        parser.error(unknown_name("program", name, programs()))
    adopt_launcher(os.environ)
    if name in ALONE or "RANK" in os.environ or {"-h", "--help"} & {*flags_of_program}:
        prepare_process()
        sys.path.insert(0, str(ROOT))
        code: int = importlib.import_module(f"benchmarks.{name}").main(flags_of_program)
        return code
    options, flags = parser.parse_known_args(flags_of_program)
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    command = [sys.executable, *start, "-m", "ddp_lab", "bench", name, *flags]
    one_thread = {"OMP_NUM_THREADS": "1"}  # torchrun's own default, without its notice
    return subprocess.run(command, env=one_thread | os.environ).returncode
