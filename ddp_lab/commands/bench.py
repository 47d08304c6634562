"""`ddp-lab bench NAME`: starts a program of benchmarks/."""

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Sequence

from ddp_lab.runtime.cli import ROOT, OneLineParser, at_least, require_checkout, unknown_name


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
        add_help=False,  # of a program, it says more
    )
    parser.add_argument("--ranks", type=at_least(1), metavar="N", help="start it under torchrun, on so many ranks")
    return parser


def main(arguments: Sequence[str]) -> int:
    require_checkout("bench")
    parser = build_parser()
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    name, *rest = arguments
    if name not in programs():
        parser.error(unknown_name("program", name, programs()))
    options, flags = parser.parse_known_args(rest)
    command = [sys.executable]
    if options.ranks is not None:
        print(f"starting {options.ranks} ranks of {name}.py", file=sys.stderr, flush=True)
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    command += [str(ROOT / "benchmarks" / f"{name}.py"), *flags]
    one_thread = {"OMP_NUM_THREADS": "1"}  # torchrun's own default, without its notice
    return subprocess.run(command, env=one_thread | os.environ).returncode
