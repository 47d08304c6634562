"""Time, bandwidth and correctness of collectives over message size, by nccl-tests' definitions.

    torchrun --standalone --nproc_per_node=2 benchmarks/collectives.py --collectives all_reduce --max-bytes 64M

Any number of ranks and nodes, over Gloo or NCCL. Every call begins at a barrier and lasts until its slowest rank is
done; on a GPU, until the device is. After the warm-up each size is checked once, element by element. After every size,
all results are in <output-dir>/reports/collectives/<backend>_<device>_<ranks>_ranks.csv.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.runtime.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

from benchmarks.collective.sizes import parse_size, size_range
from ddp_lab.runtime.cli import OneLineParser, at_least, unknown_name
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.speed import NONE, Link, canonical
from ddp_lab.runtime.settings.communication import BACKENDS
from ddp_lab.runtime.settings.field import argument

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "sharding.all_gather",
    "reduce_scatter",
    "sharding.reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "barrier",
)
"""In display order. They are torch's own; `sharding.` marks those that this project's strategies call."""
DTYPES = ("fp32", "bf16", "fp16")
REPORTS = Path("reports") / "collectives"


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add, names, types = parser.add_argument, ",".join(COLLECTIVES), ", ".join(DTYPES)
    add("--collectives", type=names_of("collective", COLLECTIVES), default=names, help=f"comma-separated, of {names}")
    add("--min-bytes", type=parse_size, default="1K", help="smallest size; K, M and G are powers of 1024 (default: 1K)")
    add("--max-bytes", type=parse_size, default="1G", help="largest size (default: 1G)")
    add("--factor", type=at_least(1.01, float), default=4.0, help="from one size to the next (default: 4)")
    add("--sizes", type=sizes, help="these sizes instead of a range, such as 1M,10M,100M")
    add("--dtypes", type=names_of("dtype", DTYPES), default="fp32", help=f"comma-separated, of {types} (default: fp32)")
    add("--warmup", type=at_least(0), default=5, help="most calls before the check; at least two are made (default: 5)")
    add("--iterations", type=at_least(1), help="timed calls (default: as many as fit --seconds-per-size, 3 to 1000)")
    in_a_row = "calls from one barrier to the next; their mean counts (default: 1; on CUDA up to 20, for 1 ms)"
    add("--in-a-row", type=at_least(1), help=in_a_row)
    spread = "calls use tensors of this size in all in turn, so that caches hold none"
    add("--spread", type=parse_size, default=0, help=spread)
    add("--seconds-per-size", type=at_least(1e-3, float), default=1.0, help="time for the timed calls of a size, in s")
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add("--backend", default="auto", help=f"{', '.join(BACKENDS)} (default: %(default)s)")
    add(
        "--link",
        type=argument(canonical),
        default=NONE,
        metavar="RATE[,LATENCY]",
        help="as of main_ddp.py (default: %(default)s)",
    )
    add("--timeout-minutes", type=float, default=10.0, help="how long a call may wait for a rank (default: 10)")
    add("--output-dir", type=Path, default=Path(), help="root of reports/ (default: the current folder)")
    return parser


def names_of(kind: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type of a flag: names with commas between."""

    def parse_names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(unknown_name(kind, name, known))
        return text.split(",")

    return parse_names


def numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: must be whole numbers above 0 with commas between, such as 2,4,6")
    return sorted({int(part) for part in parts})


def sizes(text: str) -> list[int]:
    return sorted({parse_size(part) for part in text.split(",")})


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings; `sizes` has all sizes in bytes. Leaves the process with one line if they make no sense.

    This imports no torch, so that a mistake is answered at once.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.max_bytes < options.min_bytes:
        parser.error(f"--max-bytes {options.max_bytes}: must not be below --min-bytes {options.min_bytes}")
    options.sizes = options.sizes or size_range(options.min_bytes, options.max_bytes, options.factor)
    return options


def main() -> int:
    options = parse()
    from benchmarks.collective.loop import RanksLostError, measure_all
    from ddp_lab.runtime.distributed import joined_ranks
    from ddp_lab.runtime.groups import on_every_rank
    from ddp_lab.runtime.process.environment import silence_libraries

    silence_libraries()
    try:
        names = ("device", "backend", "link", "timeout_minutes")
        config = RunConfig(**{name: getattr(options, name) for name in names})
        with joined_ranks(config) as ranks:
            results = on_every_rank(lambda: make_results(options, ranks))
            measure_all(options, ranks, results)
            if results:
                print(f"\ntable: {results.path}")
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


def make_results(options: argparse.Namespace, ranks: Any) -> Any:
    """`Results` on rank 0, None on others.

    Raises:
        UserError: files cannot be written.
    """
    if not ranks.is_main:
        return None
    from benchmarks.collective.results import Results

    path = options.output_dir / REPORTS / f"{ranks.backend}_{ranks.device.type}_{ranks.world_size}_ranks.csv"
    results = Results(path, ranks, Link.parse(options.link))
    results.write()
    return results


if __name__ == "__main__":
    sys.exit(main())
