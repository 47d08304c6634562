"""What the planner predicts, held against what was measured: every error, mean, best and worst.

    python benchmarks/planner.py t4        # the published table of two T4s; nothing is measured here
    python benchmarks/planner.py memory    # bytes of every choice, against real ranks of this machine
    python benchmarks/planner.py lab       # step times and peaks over links of several rates (root, a quiet machine)

`python benchmarks/planner.py COMMAND --help` lists the flags of a command. What the figures are is in docs/planner.md.
Exit code 0: done. 1: something could not be measured or predicted; one line on standard error says why. 2: the command
line makes no sense.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.cli import OneLineParser
from training.errors import UserError
from training.process.environment import ENVIRONMENT

COMMANDS = {name: f"benchmarks.predictions.{name}_command" for name in ("t4", "memory", "lab")}


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        found = importlib.import_module(module)
        found.add_flags(commands.add_parser(name, help=found.__doc__, description=found.__doc__, allow_abbrev=False))
    return parser


def main() -> int:
    for name, value in {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}.items():
        os.environ.setdefault(name, value)
    options = build_parser().parse_args()
    try:
        importlib.import_module(COMMANDS[options.command]).run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
