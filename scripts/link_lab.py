"""Run a script of this project as a multi-node torchrun job on this machine, over links as slow as you like.

    python scripts/link_lab.py --nodes 2 --rate 1gbit -- main_ddp.py --ddp-choice simple_ddp
    python scripts/link_lab.py --rate 250mbit,1gbit,10gbit -- benchmarks/strategies.py --choices simple_ddp,flat_ddp

Each node is a network namespace, a bridge joins them, and tc shapes each link: Linux, root and iproute2 are needed.
From another terminal, while a job runs:

    python scripts/link_lab.py list
    python scripts/link_lab.py set-rate 100mbit [--lab N] [--node N]
    python scripts/link_lab.py cut [--lab N] [--node N]
    python scripts/link_lab.py restore [--lab N] [--node N]

Exit code 0: done. 1: the job or the lab failed; one line on standard error says why. 2: the command line makes no
sense. 130 or 143: stopped by Ctrl-C or SIGTERM.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.link_lab import control
from benchmarks.link_lab.run import run_at, sweep
from ddp_lab.runtime.cli import OneLineParser, rate
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.rates import Rate

MOST_NODES = 100
SMALLEST_MTU, LARGEST_MTU = 1280, 65535


def main() -> int:
    arguments = sys.argv[1:]
    ending = (signal.SIGTERM, signal.SIGHUP)
    for number in ending:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        if arguments and arguments[0] in ("list", "set-rate", "cut", "restore"):
            change = build_control_parser().parse_args(arguments)
            is_list = change.action == "list"
            print(control.listing() if is_list else control.change(change.action, change.lab, change.node, change.rate))
            return 0
        options = parse(arguments)
        if len(options.rate) > 1:
            return sweep(options)
        run_at(options.rate[0], options, options.command, Path())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What stands before `--` is for the lab, and what follows it is the command."""
    parser = build_parser()
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    options.command = list(arguments[split + 1 :])
    if not options.command:
        parser.error("no command; give it after --, as in -- main_ddp.py --ddp-choice simple_ddp")
    script = Path(options.command[0])
    if not script.is_file() and not (ROOT / script).is_file():
        parser.error(f"{script}: no such script, here or in {ROOT}")
    options.command[0] = str(script if script.is_file() else ROOT / script)
    if len(options.rate) > 1 and options.counters:
        parser.error("--counters is for one rate, not for several")
    options.node_rate = dict(options.node_rate)
    for node in options.node_rate:
        if node >= options.nodes:
            parser.error(f"--node-rate {node}=...: nodes are 0 to {options.nodes - 1}")
    return options


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [flags] -- SCRIPT [flags of the script]",
    )
    parser.add_argument("--nodes", type=between(1, MOST_NODES), default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--rate",
        type=rates,
        default="1gbit",
        help="of each link in each direction, such as 250mbit or 1gbit, or unshaped; several with commas between them "
        "are run one after the other (default: 1gbit)",
    )
    parser.add_argument(
        "--node-rate",
        type=node_rate,
        action="append",
        default=[],
        metavar="NODE=RATE",
        help="another rate for the link of one node, such as 1=500mbit; may be repeated",
    )
    parser.add_argument(
        "--nproc-per-node", type=between(1, 64), default=1, metavar="N", help="ranks a node (default: 1)"
    )
    parser.add_argument(
        "--mtu",
        type=between(SMALLEST_MTU, LARGEST_MTU),
        default=9000,
        metavar="BYTES",
        help="largest packet; 9000 as in clusters (default), 1500 as in offices",
    )
    parser.add_argument("--delay", metavar="TIME", help="one way, between any two nodes, such as 1ms; needs netem")
    parser.add_argument("--counters", type=Path, metavar="FILE", help="CSV of each link's byte counters every 100 ms")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("link_rates"),
        metavar="DIR",
        help="with several rates: the root of results and page (default: link_rates)",
    )
    return parser


def build_control_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="running labs, and those that were left behind")
    for name in ("set-rate", "cut", "restore"):
        action = actions.add_parser(name, allow_abbrev=False)
        if name == "set-rate":
            action.add_argument("rate", type=rate)
        else:
            action.set_defaults(rate=None)
        action.add_argument("--lab", type=int, metavar="N", help="default: the only one that runs")
        action.add_argument("--node", type=int, metavar="N", help="default: all nodes")
    return parser


def between(least: int, most: int) -> type:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be {least} to {most}")
        return value

    return number  # type: ignore[return-value]


def rates(text: str) -> list[Rate]:
    return list(dict.fromkeys(map(rate, text.split(","))))


def node_rate(text: str) -> tuple[int, Rate]:
    node, _, of_node = text.partition("=")
    if not node.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be a node and its rate, such as 1=500mbit")
    return int(node), rate(of_node)


if __name__ == "__main__":
    sys.exit(main())
