"""Run a script of this project as a multi-node torchrun job on this machine, over links as slow as you like.

    python scripts/link_lab.py --nodes 2 --rate 1gbit -- main_ddp.py --ddp-choice simple_ddp

Each node is a network namespace; a bridge joins them, and `tc` shapes each link. Needs Linux, root and iproute2.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.link_lab.counters import Counters
from benchmarks.link_lab.launch import run_job
from benchmarks.link_lab.namespaces import lab_network
from benchmarks.link_lab.rates import Rate
from training.cli import OneLineParser
from training.errors import UserError


def main() -> int:
    options = build_parser().parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        rates = [Rate.parse(options.rate)] * options.nodes
        with (
            lab_network(rates, options.mtu, options.delay, options.command) as lab,
            tempfile.TemporaryDirectory() as logs,
        ):
            print(f"link lab {lab.number}: {options.nodes} nodes x {options.nproc_per_node}, {rates[0]}", flush=True)
            counters = Counters(lab)
            try:
                run_job(lab, options.command, options.nproc_per_node, Path(logs), lambda: None)
            finally:
                for node, counted in zip(lab.nodes, counters.read(), strict=True):
                    print(
                        f"link: node {node.number} sent {counted.sent / 1e6:.2f} MB, received {counted.received / 1e6:.2f} MB"
                    )
                counters.close()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--mtu", type=int, default=9000)
    parser.add_argument("--delay")
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("command", nargs="+")
    return parser


if __name__ == "__main__":
    sys.exit(main())
