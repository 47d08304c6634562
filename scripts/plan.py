"""What each strategy would need and take on devices that you do not have: its own code, run on tensors without data.

    python scripts/plan.py --model SmolLM2-360M --gpus 2xL4 --link pcie4            # all choices, and which to take
    python scripts/plan.py memory --parameters 7.5e9 --ranks 64 --precision mixed   # formulas, term by term
    python scripts/plan.py record --model SmolLM2-360M --output l4.json             # times of this device, for --record
    python scripts/plan.py savings profile/zero1                                    # of its memory, by other settings

`python scripts/plan.py COMMAND --help` lists the flags of a command.
Exit code 0: done. 2: the command line makes no sense, or what it names cannot be used; one line on standard error says
why. 130: stopped by Ctrl-C.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_lab.planner.flags import COMMANDS
from ddp_lab.runtime.cli import OneLineParser, unknown_name
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.process.environment import prepare_process

DEFAULT = "plan"
WIDTH = 240
"""Characters of the widest table: a file or a pipe has no width of its own."""


def build_parser(command: str) -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    COMMANDS[command][0](parser)
    return parser


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments = sys.argv[1:]
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else DEFAULT
    if command not in COMMANDS:
        OneLineParser().error(unknown_name("command", command, COMMANDS))
    parser = build_parser(command)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(unknown_name("argument", unknown[0], known))
    from rich.console import Console

    try:
        importlib.import_module(COMMANDS[command][1]).run(options, Console(highlight=False, width=WIDTH))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    prepare_process()  # `record` times operators as runs have them
    sys.exit(main())
