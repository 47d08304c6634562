"""Measure collectives with several numbers of ranks on this node.

    python scripts/bench_collectives.py --ranks 2,4 --max-bytes 64M

Starts `torchrun benchmarks/collectives.py` for each number of ranks, with all other flags passed on; its --help
explains them, and its files. Ctrl-C keeps what was measured.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set the same, with a warning

from benchmarks.collectives import numbers, parse
from ddp_lab.runtime.cli import OneLineParser

END_S = 30
"""How long ranks may take to end after Ctrl-C."""


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    several = "numbers of processes, with commas between (default: 2)"
    parser.add_argument("--ranks", type=numbers, default=[2], help=several)
    return parser


def main() -> int:
    options, flags = build_parser().parse_known_args()
    parse(flags)  # a mistake in the flags is answered here, once
    try:
        done = [measure(ranks, flags) for ranks in options.ranks]
    except KeyboardInterrupt:
        return 130
    return int(not all(done))


def measure(ranks: int, flags: Sequence[str]) -> bool:
    """Run the benchmark; if it fails, say why in one line.

    Raises:
        KeyboardInterrupt: after all ranks have ended.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    with tempfile.TemporaryFile("w+") as errors:
        command = [*launcher, str(ROOT / "benchmarks" / "collectives.py"), *flags]
        process = subprocess.Popen(command, stderr=errors)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            end(process)
            raise
        if code:
            errors.seek(0)
            lines = errors.read().splitlines()
            reason = next((line for line in lines if line.startswith("error: ")), None)
            print(reason or f"error: a rank of {ranks} was killed, or failed", file=sys.stderr, flush=True)
        return code == 0


def end(process: "subprocess.Popen[bytes]") -> None:
    """A terminal's Ctrl-C reaches the ranks too, but a signal to this process alone does not."""
    try:
        process.terminate()
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
