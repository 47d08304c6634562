"""Measure collectives with several numbers of ranks on this node, and show them on one page.

    python scripts/bench_collectives.py --ranks 2,4 --max-bytes 64M
    python scripts/bench_collectives.py --published          # beside published figures
    python scripts/bench_collectives.py --from FILE.json ... # a page of what was measured before, on any machines

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

from benchmarks.collectives import REPORTS, parse
from training.cli import OneLineParser, exit_with_error

END_S = 30
"""How long ranks may take to end after Ctrl-C."""
PUBLISHED = ["--collectives", "all_reduce", "--sizes", "1M,10M,100M,1024M", "--dtypes", "fp32"]
PUBLISHED_RANKS = "2,4,6"


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", help="numbers of processes, with commas between (default: 2)")
    parser.add_argument(
        "--published",
        action="store_true",
        help="all-reduce of 1, 10, 100 and 1024 MB (2^20 bytes) with 2, 4 and 6 ranks over Gloo on the CPU, and over "
        "NCCL where there are GPUs, beside the published figures",
    )
    parser.add_argument(
        "--from",
        dest="files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing; a page of these .json files of earlier runs",
    )
    return parser


def main() -> int:
    parser = build_parser()
    options, flags = parser.parse_known_args()
    if options.published:
        if any(flag.split("=")[0] in PUBLISHED for flag in flags):
            parser.error(f"--published sets {', '.join(PUBLISHED[::2])} itself")
        flags = [*PUBLISHED, *flags]
    settings = parse(flags)  # a mistake in them is answered here, once
    folder = settings.output_dir / REPORTS
    if options.files:
        return write_report(options.files, folder, options.published)
    numbers = parse_ranks(options.ranks or (PUBLISHED_RANKS if options.published else "2"))
    runs = [(number, flags) for number in numbers]
    if options.published and settings.device == settings.backend == "auto":
        runs = published_runs(numbers, flags)
    started, failed = set(), False
    stopped = False
    for number, of_run in runs:
        before = {path: path.stat().st_mtime_ns for path in folder.glob("*_ranks.json")}
        try:
            failed |= not measure(number, of_run)
        except KeyboardInterrupt:
            stopped = True
        started |= {path for path in folder.glob("*_ranks.json") if before.get(path) != path.stat().st_mtime_ns}
        if stopped:
            break
    if not started:
        return 130 if stopped else 1
    code = write_report(sorted(started), folder, options.published)
    return 130 if stopped else code or int(failed)


def parse_ranks(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        exit_with_error(f"--ranks {text}: must be whole numbers above 0 with commas between, such as 2,4,6")
    return sorted({int(number) for number in numbers})


def published_runs(numbers: Sequence[int], flags: list[str]) -> list[tuple[int, list[str]]]:
    """Gloo on the CPU with each number of ranks; NCCL with those for which there are GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    runs = [(number, [*flags, "--device", "cpu", "--backend", "gloo"]) for number in numbers]
    return runs + [(number, [*flags, "--device", "cuda", "--backend", "nccl"]) for number in numbers if number <= gpus]


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
    """Of a terminal's Ctrl-C the ranks know already; of a signal to this process alone they do not."""
    try:
        process.terminate()
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def write_report(files: Sequence[Path], folder: Path, is_published: bool) -> int:
    from analysis.errors import TraceError
    from benchmarks.collective_report import report

    try:
        page = report(files, folder, is_published)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\nopen {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
