"""Measure collectives with several numbers of ranks on this node, and show them on one page.

    python scripts/bench_collectives.py --ranks 2,4 --max-bytes 64M
    python scripts/bench_collectives.py --from FILE.json ... # a page of earlier results, of any machines

Starts `torchrun benchmarks/collectives.py` for each number of ranks, with all other flags passed on; its --help
explains them. Then writes collectives.html and collectives.csv into <output-dir>/reports/collectives/. Ctrl-C keeps
what was measured.
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

from benchmarks.collectives import REPORTS, numbers, parse
from ddp_lab.runtime.cli import OneLineParser

END_S = 30
"""How long ranks may take to end after Ctrl-C."""


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--ranks", type=numbers, default=[2], help="numbers of processes, with commas between (default: 2)"
    )
    parser.add_argument(
        "--from",
        dest="files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing; make a page of these .json files of earlier runs",
    )
    return parser


def main() -> int:
    options, flags = build_parser().parse_known_args()
    folder = parse(flags).output_dir / REPORTS  # a mistake in the flags is answered here, once
    if options.files:
        return write_report(options.files, folder)
    written: set[Path] = set()
    failed = stopped = False
    for ranks in options.ranks:
        before = {path: path.stat().st_mtime_ns for path in folder.glob("*_ranks.json")}
        try:
            failed |= not measure(ranks, flags)
        except KeyboardInterrupt:
            stopped = True
        written |= {path for path in folder.glob("*_ranks.json") if before.get(path) != path.stat().st_mtime_ns}
        if stopped:
            break
    if not written:
        return 130 if stopped else 1
    code = write_report(sorted(written), folder)
    return 130 if stopped else code or int(failed)


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


def write_report(files: Sequence[Path], folder: Path) -> int:
    from benchmarks.collective.report import report
    from ddp_lab.analysis.errors import TraceError

    try:
        page = report(files, folder)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\nopen {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
