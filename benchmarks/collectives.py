"""Time, bandwidth and correctness of collectives over message size, by nccl-tests' definitions.

    torchrun --standalone --nproc_per_node=2 benchmarks/collectives.py --collectives all_reduce --max-bytes 64M

Any number of ranks and nodes, over Gloo or NCCL. Every call begins at a barrier and lasts until its slowest rank is
done; on a GPU, until the device is. After the warm-up each size is checked once, element by element. What has been
measured is in <output-dir>/reports/collectives/<backend>_<device>_<ranks>_ranks.csv and .json after every size.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

from benchmarks.sizes import parse_size, size_range
from training.cli import OneLineParser, exit_with_error, unknown_name
from training.config import RunConfig
from training.errors import UserError

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "sharding.all_gather",
    "reduce_scatter",
    "sharding.reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "send_recv",
    "barrier",
)
"""In display order; torch's own, but for what `sharding.` stands before: those that this project's strategies call."""
DTYPES = ("fp32", "bf16", "fp16")
REPORTS = Path("reports") / "collectives"


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--collectives", default=",".join(COLLECTIVES), help="which, with commas between (default: all: %(default)s)")
    add("--min-bytes", default="1K", help="smallest size; K, M and G are powers of 1024 (default: %(default)s)")
    add("--max-bytes", default="1G", help="largest size (default: %(default)s)")
    add("--factor", type=float, default=4.0, help="from one size to the next (default: %(default)s)")
    add("--sizes", help="these sizes instead of a range, such as 1M,10M,100M")
    add("--dtypes", default="fp32", help=f"with commas between, of {', '.join(DTYPES)} (default: %(default)s)")
    add("--warmup", type=int, default=5, help="most calls before the check; there are two at least (default: 5)")
    add("--iterations", type=int, help="timed calls (default: as many as fit --seconds-per-size, 3 to 1000)")
    add("--in-a-row", type=int, default=1, help="calls from one barrier to the next; their mean counts (default: 1)")
    add("--spread", help="calls take turns on tensors of this size in all, as in training, so that caches hold none")
    add("--seconds-per-size", type=float, default=1.0, help="time for the timed calls of a size (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add("--backend", default="auto", help="auto, gloo or nccl (default: %(default)s)")
    add("--timeout-minutes", type=float, default=10.0, help="how long a call may wait for a rank (default: 10)")
    add("--output-dir", type=Path, default=Path(), help="root of reports/ (default: the current folder)")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings; `collectives`, `sizes` (bytes) and `dtypes` are lists. Leaves with one line if they make no sense.

    This imports no torch, so that a mistake is answered at once.
    """
    options = build_parser().parse_args(arguments)
    options.collectives, options.dtypes = options.collectives.split(","), options.dtypes.split(",")
    for kind, given, known in (
        ("collective", options.collectives, COLLECTIVES),
        ("dtype", options.dtypes, DTYPES),
    ):
        for name in given:
            if name not in known:
                exit_with_error(f"--{kind}s: {unknown_name(kind, name, known)}")
    options.sizes = sizes_of(options)
    options.spread = spread_of(options)
    for flag, value, least in (
        ("--warmup", options.warmup, 0),
        ("--iterations", options.iterations, 1),
        ("--in-a-row", options.in_a_row, 1),
    ):
        if value is not None and value < least:
            exit_with_error(f"{flag} {value}: must be a whole number of at least {least}")
    if not 0 < options.seconds_per_size < float("inf"):
        exit_with_error(f"--seconds-per-size {options.seconds_per_size}: must be a number above 0")
    return options


def sizes_of(options: argparse.Namespace) -> list[int]:
    flag = ""
    try:
        if options.sizes is not None:
            flag = "--sizes"
            return sorted({parse_size(value) for value in options.sizes.split(",")})
        flag = "--min-bytes"
        least = parse_size(options.min_bytes)
        flag = "--max-bytes"
        most = parse_size(options.max_bytes)
    except ValueError as error:
        exit_with_error(f"{flag}: {error}")
    if most < least:
        exit_with_error(f"--max-bytes {options.max_bytes}: must not be below --min-bytes {options.min_bytes}")
    if not 1.01 <= options.factor < float("inf"):
        exit_with_error(f"--factor {options.factor}: must be at least 1.01, such as 2 or 4")
    return size_range(least, most, options.factor)


def spread_of(options: argparse.Namespace) -> int:
    """Bytes; 0 for one tensor."""
    try:
        return parse_size(options.spread) if options.spread is not None else 0
    except ValueError as error:
        exit_with_error(f"--spread: {error}")


def file_stem(backend: str, device: str, world_size: int) -> str:
    return f"{backend}_{device}_{world_size}_ranks"


def main() -> int:
    options = parse()
    from benchmarks.collective_loop import RanksLostError, measure_all
    from training.distributed import joined_ranks
    from training.run import silence_libraries

    silence_libraries()
    try:
        config = RunConfig(device=options.device, backend=options.backend, timeout_minutes=options.timeout_minutes)
        with joined_ranks(config) as ranks:
            results = from_rank0_results(options, ranks)
            measure_all(options, ranks, results)
            if results:
                results.write(complete=True)
                print(f"\ntable: {results.path}.csv")
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0" or (rank == "1" and isinstance(error, RanksLostError)):  # rank 0 may be the one that is gone
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"\nstopped; what was measured is in {options.output_dir / REPORTS}", file=sys.stderr, flush=True)
        os._exit(130)  # other ranks may be gone, and leaving the group would wait for them
    return 0


def from_rank0_results(options: argparse.Namespace, ranks: Any) -> Any:
    """`Results` on rank 0, None on others. Collective.

    Raises:
        UserError: on every rank, where files cannot be written.
    """
    from training.distributed import on_every_rank

    def make() -> Any:
        if not ranks.is_main:
            return None
        from benchmarks.collective_results import Results

        path = options.output_dir / REPORTS / file_stem(ranks.backend, ranks.device.type, ranks.world_size)
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        return Results(path, ranks, settings)

    return on_every_rank(make)


if __name__ == "__main__":
    sys.exit(main())
