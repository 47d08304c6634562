"""Time, bandwidth and correctness of collectives over message size, by nccl-tests' definitions.

    torchrun --standalone --nproc_per_node=2 benchmarks/collectives.py --collectives all_reduce --sizes 4K,1M,64M

Any number of ranks and nodes, over Gloo or NCCL. Every call begins at a barrier and lasts until its slowest rank is
done; on a GPU, until the device is. After the warm-up each size is checked once, element by element. After every size,
all results are in <output-dir>/reports/collectives/<backend>_<device>_<ranks>_ranks.csv (<device>-shared if GPUs are).
"""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.runtime.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

from ddp_lab.runtime.cli import OneLineParser, at_least, unknown_name
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import OneRankError, UserError, speaks_for_node
from ddp_lab.runtime.flags import add_flags

if TYPE_CHECKING:
    from ddp_lab.runtime.distributed import Ranks

COLLECTIVES = (
    *("all_reduce", "all_gather", "sharding.all_gather"),
    *("reduce_scatter", "sharding.reduce_scatter", "broadcast", "all_to_all"),
)
"""In display order. They are torch's own; `sharding.` marks those that this project's strategies call."""
AS_THE_RUNNERS = ("device", "backend", "share_gpu", "link", "timeout_minutes")
DTYPES = ("fp32", "bf16", "fp16")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
REPORTS = Path("reports") / "collectives"
COLUMNS = {
    "collective": "what was measured; `sharding.` before what the project's strategies call",
    "world_size": "processes that took part",
    "backend": "gloo, nccl or nccl-legacy",
    "device": "where the tensors were: cpu or cuda",
    "link_bits_per_s": "rate of each rank's link by `--link`",
    "size_bytes": "payload by nccl-tests' definition; of what is shared out, the whole",
    "type": "fp32, bf16 or fp16",
    "calls": "timed calls; in each, the slowest rank's time counts",
    "p50_us": "median time of a call, from a start that all ranks share",
    "p95_us": "time that 5 % of the calls exceeded",
    "busbw_gb_per_s": "size over median time, in 10^9 bytes a second, times nccl-tests' factor for it",
    "wrong": "wrong elements of one checked call, summed over ranks",
}
"""Of the CSV, with their meanings."""
SHOWN = {"type": (5, ""), "size_bytes": (12, ""), "calls": (6, ""), "p50_us": (12, ".1f"), "p95_us": (12, ".1f")}
SHOWN |= {"busbw_gb_per_s": (15, ".3f"), "wrong": (7, "")}
"""Columns of the terminal: width and format."""


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add, names, types = parser.add_argument, ",".join(COLLECTIVES), ", ".join(DTYPES)
    add("--collectives", type=names_of("collective", COLLECTIVES), default=names, help=f"comma-separated, of {names}")
    usual = "1K,4K,16K,64K,256K,1M,4M,16M,64M"
    add("--sizes", type=sizes, default=usual, help=f"K, M and G are powers of 1024 (default: {usual})")
    add("--dtypes", type=names_of("dtype", DTYPES), default="fp32", help=f"comma-separated, of {types} (default: fp32)")
    in_a_row = "calls from one barrier to the next; their mean counts (default: 1; on CUDA up to 20, for 1 ms)"
    add("--in-a-row", type=at_least(1), help=in_a_row)
    add("--seconds-per-size", type=at_least(1e-3, float), default=1.0, help="time for the timed calls of a size, in s")
    add_flags(parser, AS_THE_RUNNERS)
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


def sizes(text: str) -> list[int]:
    """A type of a flag: bytes, such as `4096`, `1K` or `1.5MiB`, with commas between; the smallest first."""
    found = {
        part: re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)(?:i?B)?", part.strip(), re.I) for part in text.split(",")
    }
    numbers = {part: float(match[1]) * UNITS[match[2].upper()] if match else 0 for part, match in found.items()}
    for part, number in numbers.items():
        if number < 1 or number != int(number):
            raise argparse.ArgumentTypeError(f"'{part}' is not a size; write bytes, or such as 1K, 4M or 1G")
    return sorted(map(int, numbers.values()))


def main() -> int:
    options = build_parser().parse_args()
    from ddp_lab.runtime.distributed import joined_ranks
    from ddp_lab.runtime.process.environment import silence_libraries

    silence_libraries()
    try:
        with joined_ranks(RunConfig(**{name: getattr(options, name) for name in AS_THE_RUNNERS})) as ranks:
            measure_all(options, ranks)
    except UserError as error:
        if speaks_for_node():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        os._exit(130)  # other ranks may be gone, and leaving the group would wait for them
    return 0


def measure_all(options: argparse.Namespace, ranks: "Ranks") -> None:
    """Measure what the command line names; on rank 0, print it and write it. Collective.

    Raises:
        OneRankError: another rank has gone, or memory ran out.
        UserError: the file cannot be written.
    """
    import pandas as pd
    import torch.distributed as dist

    from benchmarks.calls import measured
    from ddp_lab.analysis.files import write_csv

    device = ranks.device.type + ("-shared" if ranks.gpu_sharing else "")
    name = f"{ranks.backend}_{device}_{ranks.world_size}_ranks.csv"
    path, rows = options.output_dir / REPORTS / name, list[dict[str, Any]]()
    control = dist.new_group(backend="gloo")  # over CPU, so that clocks and barriers do not queue on a GPU
    for collective, dtype in itertools.product(options.collectives, options.dtypes):
        if ranks.is_main:
            print(f"\n{collective}: {ranks.world_size} ranks, {ranks.backend} on {ranks.device.type}")
            print(*(f"{column:>{width}}" for column, (width, _) in SHOWN.items()), flush=True)
        for size in options.sizes:
            try:
                found = measured(collective, dtype, size, options, ranks, control)
            except RuntimeError as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                where = f"rank {ranks.rank} stopped at {collective} {dtype} of {size:,} bytes"
                raise OneRankError(f"{where}: {reason}; what was measured until then is in {path}") from None
            if ranks.is_main:
                row = dict(zip(COLUMNS, found, strict=True))
                print(*(f"{row[column]:>{width}{digits}}" for column, (width, digits) in SHOWN.items()), flush=True)
                rows.append(row)
                write_csv(path, pd.DataFrame(rows, columns=list(COLUMNS)))
    if ranks.is_main:
        print(f"\ntable: {path}")


if __name__ == "__main__":
    sys.exit(main())
