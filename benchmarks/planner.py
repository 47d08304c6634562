"""What the planner predicts against what was measured: every error, mean, smallest and largest.

    python benchmarks/planner.py t4        # the published table of two T4s; nothing is measured here
    python benchmarks/planner.py memory    # bytes of every choice, against real ranks of this machine
    python benchmarks/planner.py steps     # step times, too, also over slow links (a quiet machine)

`python benchmarks/planner.py COMMAND --help` lists the flags of a command. What the figures mean is in docs/planner.md.
Exit code 0: done. 1: something could not be measured or predicted; one line on standard error says why. 2: the command
line makes no sense.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_lab.runtime.cli import OneLineParser
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.process.environment import quiet_libraries

HAND_WRITTEN = "simple_ddp,flat_ddp,simple_ddp_hook,simple_ddp_async,bucket_ddp_async,zero1,zero2,zero3"


def build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    t4, memory, steps = (commands.add_parser(name, allow_abbrev=False) for name in ("t4", "memory", "steps"))
    memory.set_defaults(links="none", rounds=0, grad_accum_steps=2)
    steps.set_defaults(grad_accum_steps=1)
    default = "(default: %(default)s)"
    for command, models, choices in ((memory, "sample,mlp", None), (steps, "mlp-wide", HAND_WRITTEN)):
        add = command.add_argument
        add("--models", default=models, help=f"of sample, mlp, mlp-wide {default}")
        add("--choices", default=choices, help="strategies, with commas between (default: %(default)s; None: all)")
        add("--ranks", type=int, default=2, help=f"number of real ranks over Gloo {default}")
    add("--links", default="none", help=f"rates of links, such as 250mbit,1gbit {default}")
    add("--rounds", type=int, default=5, help=f"of three steps of a choice; the median counts {default}")
    for command in (t4, memory, steps):
        command.add_argument("--csv", type=Path, metavar="FILE", help="write the table there")
    return parser


def main() -> int:
    for name, value in {**quiet_libraries(), "OMP_NUM_THREADS": "1"}.items():
        os.environ.setdefault(name, value)
    options = build_parser().parse_args()
    from benchmarks.predictions import machine, t4

    try:
        (t4 if options.command == "t4" else machine).run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
