"""Time, bandwidth and correctness of collectives over message size, by nccl-tests' definitions.

    ddp-lab bench collectives --ranks 2 --collectives all_reduce --sizes 4K,1M,64M

Any number of ranks and nodes, over Gloo or NCCL. Every call begins at a barrier and lasts until its slowest rank is
done; on a GPU, until the device is. After the warm-up each size is checked once, element by element. After every size,
all results are in <output-dir>/reports/collectives/<backend>_<device>_<ranks>_ranks.csv (<device>-shared if GPUs are).

Values are whole numbers that are small enough for sums over all ranks to be exact in every dtype, in any order of
adding.
"""

import argparse
import itertools
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rounds import run_program
from ddp_lab.analysis.files import write_csv
from ddp_lab.collectives.kinds import bus_factor
from ddp_lab.progress import long_work
from ddp_lab.runtime.cli import OneLineParser, at_least, names_of
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.errors import OneRankError
from ddp_lab.runtime.flags import add_flags
from ddp_lab.runtime.link.speed import SimulatedLink
from ddp_lab.strategy.communication.collectives import all_gather, reduce_scatter

CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_reduce": lambda received, sent: dist.all_reduce(received),
    "all_gather": dist.all_gather_into_tensor,
    "sharding.all_gather": lambda received, sent: all_gather(received, dist.group.WORLD).wait(),
    "reduce_scatter": dist.reduce_scatter_tensor,
    "sharding.reduce_scatter": lambda received, sent: reduce_scatter(received, sent, dist.group.WORLD).wait(),
    "broadcast": lambda received, sent: dist.broadcast(received, BROADCASTER),
    "all_to_all": dist.all_to_all_single,
}
"""In display order: what issues each, and waits for it. They are torch's own; `sharding.` marks those that this
project's strategies call."""
BROADCASTER = 0


def part_of_rank(tensor: Tensor, ranks: RankContext) -> Tensor:
    return tensor.chunk(ranks.world_size)[ranks.rank]


RESULTS: dict[str, Callable[[Iterable[Tensor], RankContext], Tensor]] = {
    "all_reduce": lambda sent, ranks: sum(sent, torch.tensor(0)),
    "all_gather": lambda sent, ranks: torch.cat(list(sent)),
    "reduce_scatter": lambda sent, ranks: part_of_rank(sum(sent, torch.tensor(0)), ranks),
    "broadcast": lambda sent, ranks: next(itertools.islice(sent, BROADCASTER, None)),
    "all_to_all": lambda sent, ranks: torch.cat([part_of_rank(tensor, ranks) for tensor in sent]),
}
"""What a rank must receive of what all send, in the order of ranks."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST_EXACT = 256
"""bf16 holds every whole number up to here."""
FEWEST_CALLS, MOST_CALLS = 3, 1000
WARMUP_SHARE, MOST_WARMUP = 0.2, 3
"""Of --seconds-per-size, for at most so many warm-up calls beyond the first two."""
IN_A_ROW_S, MOST_IN_A_ROW = 1e-3, 20
"""On CUDA, calls follow each other for so long: a single small one would show how long Python takes to launch it."""
AS_THE_RUNNERS = ("device", "backend", "share_gpu", "link", "timeout_minutes")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
REPORTS = Path("reports") / "collectives"
COLUMNS = {
    "collective": "the collective; `sharding.` marks the versions of this project's strategies",
    "world_size": "processes that took part",
    "backend": "gloo, nccl or nccl-legacy",
    "device": "where the tensors were: cpu or cuda",
    "link_bits_per_s": "rate of each rank's link by `--link`",
    "size_bytes": "payload by nccl-tests' definition; for a scattered or gathered tensor, the whole tensor",
    "type": "fp32, bf16 or fp16",
    "calls": "timed calls; in each, the slowest rank's time counts",
    "p50_us": "median time of a call, from a start that all ranks share",
    "p95_us": "time that 5 % of the calls exceeded",
    "busbw_gb_per_s": "size over median time, in 10^9 bytes a second, times nccl-tests' factor for it",
    "wrong": "wrong elements of one checked call, summed over ranks",
}
"""The columns of the CSV, with their meanings."""


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser("ddp-lab bench collectives", description=__doc__)
    add, names, types = parser.add_argument, ",".join(CALLS), ", ".join(DTYPES)
    add("--collectives", type=names_of("collective", list(CALLS)), default=names, help=f"comma-separated, of {names}")
    usual = "1K,4K,16K,64K,256K,1M,4M,16M,64M"
    add("--sizes", type=sizes, default=usual, help=f"K, M and G are powers of 1024 (default: {usual})")
    add(
        "--dtypes",
        type=names_of("dtype", list(DTYPES)),
        default="fp32",
        help=f"comma-separated, of {types} (default: fp32)",
    )
    in_a_row = "calls from one barrier to the next; their mean counts (default: 1; on CUDA up to 20, for 1 ms)"
    add("--in-a-row", type=at_least(1), help=in_a_row)
    add("--seconds-per-size", type=at_least(1e-3, float), default=1.0, help="time for the timed calls of a size, in s")
    add_flags(parser, AS_THE_RUNNERS)
    add("--output-dir", type=Path, default=Path(), help="root of reports/ (default: the current folder)")
    return parser


def sizes(text: str) -> list[int]:
    """A type of a flag: bytes, such as `4096`, `1K` or `1.5MiB`, with commas between; the smallest first."""
    matches = {
        part: re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)(?:i?B)?", part.strip(), re.I) for part in text.split(",")
    }
    numbers = {part: float(match[1]) * UNITS[match[2].upper()] if match else 0 for part, match in matches.items()}
    for part, number in numbers.items():
        if number < 1 or number != int(number):
            raise argparse.ArgumentTypeError(f"'{part}' is not a size; write bytes, or such as 1K, 4M or 1G")
    return sorted(map(int, numbers.values()))


def sent_by(rank: int, count: int, dtype: torch.dtype, ranks: RankContext) -> Tensor:
    """What a rank sends: whole numbers from 0. Their sum over all ranks is at most `LARGEST_EXACT`, so ranks beyond
    that number send zeros."""
    most = LARGEST_EXACT // ranks.world_size or int(rank < LARGEST_EXACT)
    generator = torch.Generator(ranks.device).manual_seed(rank)
    return torch.randint(0, most + 1, (count,), generator=generator, dtype=dtype, device=ranks.device)


class TimedCall:
    """A collective on one rank, with its tensors.

    Args:
        count: Number of elements, a multiple of the world size.
    """

    def __init__(self, collective: str, count: int, dtype: torch.dtype, ranks: RankContext) -> None:
        self.issue, self.name, self.ranks = CALLS[collective], collective.removeprefix("sharding."), ranks
        full = torch.zeros(count, dtype=dtype, device=ranks.device)
        part = full.chunk(ranks.world_size)[ranks.rank]
        self.sent = part if self.name == "all_gather" else full
        outputs = {"reduce_scatter": part, "all_to_all": full}  # the others work in place
        self.received = torch.zeros_like(outputs[self.name]) if self.name in outputs else full

    def run(self) -> None:
        self.issue(self.received, self.sent)

    def count_wrong(self) -> int:
        """Run the collective once, and return how many elements of this rank are wrong. NaN is wrong too.

        Leaves zeros, which stay zeros however often a sum is repeated.
        """
        inputs = [self.sent.shape[0], self.sent.dtype, self.ranks]
        self.sent.copy_(sent_by(self.ranks.rank, *inputs))
        self.run()
        everyone = (sent_by(rank, *inputs) for rank in range(self.ranks.world_size))
        wrong = int((self.received != RESULTS[self.name](everyone, self.ranks)).sum())
        self.sent.zero_()
        self.received.zero_()
        return wrong


def measured(
    collective: str, type_name: str, size: int, options: argparse.Namespace, ranks: RankContext, control: Any
) -> list[Any]:
    """The row of one size, by `COLUMNS`, on every rank. Collective.

    Args:
        size: In bytes. It is made a multiple of an element for each rank.
        control: A group over the CPU, so that clocks and barriers do not queue on a GPU.

    Raises:
        RuntimeError: another rank is lost, or this one has too little memory.
    """
    dtype, is_cuda = DTYPES[type_name], ranks.device.type == "cuda"
    count = max(size // dtype.itemsize // ranks.world_size, 1) * ranks.world_size
    call = TimedCall(collective, count, dtype, ranks)
    # warm up
    call.run()
    (estimate,) = seconds_of(call, 1, 1, ranks, control)
    for _ in range(min(MOST_WARMUP, int(WARMUP_SHARE * options.seconds_per_size / estimate))):
        call.run()
    # check
    wrong = torch.tensor(call.count_wrong())
    dist.all_reduce(wrong, group=control)
    # time
    in_a_row = options.in_a_row or (min(max(int(IN_A_ROW_S / estimate), 1), MOST_IN_A_ROW) if is_cuda else 1)
    calls = min(max(int(options.seconds_per_size / estimate / in_a_row), FEWEST_CALLS), MOST_CALLS)
    median, p95 = np.percentile(seconds_of(call, calls, in_a_row, ranks, control), [50, 95]).tolist()
    size, link = count * dtype.itemsize, SimulatedLink.parse(options.link)
    busbw = bus_factor(collective.removeprefix("sharding."), ranks.world_size) * size / median / 1e9
    where = [ranks.world_size, ranks.backend, ranks.device.type, link.bits_per_s if link else None]
    return [collective, *where, size, type_name, calls, 1e6 * median, 1e6 * p95, busbw, int(wrong)]


def seconds_of(call: TimedCall, calls: int, in_a_row: int, ranks: RankContext, control: Any) -> list[float]:
    """Seconds of each timed call on its slowest rank, from a common start; a mean over calls in a row. Collective."""

    def synchronize() -> None:
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)

    times = torch.zeros(calls, dtype=torch.float64)
    for index in range(calls):
        synchronize()
        dist.barrier(group=control)
        start = time.perf_counter()
        for _ in range(in_a_row):
            call.run()
        synchronize()
        times[index] = (time.perf_counter() - start) / in_a_row
    dist.all_reduce(times, dist.ReduceOp.MAX, group=control)
    return times.tolist()


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    settings = {name: getattr(options, name) for name in AS_THE_RUNNERS}
    return run_program(partial(measure_all, options), None, **settings)


def measure_all(options: argparse.Namespace, _: RunConfig, ranks: RankContext) -> pd.DataFrame:
    """Measure what the command line names; on rank 0, write it after every size. Collective.

    Raises:
        OneRankError: another rank has gone, or memory ran out.
        UserError: the file cannot be written.
    """
    device = ranks.device.type + ("-shared" if ranks.gpu_sharing else "")
    name = f"{ranks.backend}_{device}_{ranks.world_size}_ranks.csv"
    path, table = options.output_dir / REPORTS / name, pd.DataFrame(columns=list(COLUMNS))
    control = dist.new_group(backend="gloo")  # over CPU, so that clocks and barriers do not queue on a GPU
    cases = list(itertools.product(options.collectives, options.dtypes, options.sizes))
    with long_work(f"measuring {path}", len(cases), ranks.is_main) as tell:
        for collective, dtype, size in cases:
            try:
                table.loc[len(table)] = measured(collective, dtype, size, options, ranks, control)
            except RuntimeError as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                where = f"rank {ranks.rank} stopped at {collective} {dtype} of {size:,} bytes"
                raise OneRankError(f"{where}: {reason}; what was measured until then is in {path}") from None
            if ranks.is_main:
                write_csv(path, table)
            tell(f"{collective} {dtype} {size:,} bytes: {table.iloc[-1]['busbw_gb_per_s']:.3f} GB/s")
    return table
