"""The collectives that `benchmarks/collectives.py` measures: how each is called, checked and timed.

Values are whole numbers that are small enough for sums over all ranks to be exact in every dtype, in any order of
adding. A rank's pattern repeats after a prime number of elements, so that a part in the wrong place is seen.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.collectives.kinds import bus_factor
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.link.speed import Link
from ddp_lab.strategy.communication.collectives import all_gather as project_all_gather
from ddp_lab.strategy.communication.collectives import reduce_scatter as project_reduce_scatter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST_EXACT = 256
"""bf16 holds every whole number up to here."""
PERIOD = 65_537
ROOT = 0
FEWEST_CALLS, MOST_CALLS = 3, 1000
WARMUP_SHARE, MOST_WARMUP = 0.2, 3
"""Of --seconds-per-size, for at most so many warm-up calls beyond the first two."""
IN_A_ROW_S, MOST_IN_A_ROW = 1e-3, 20
"""On CUDA, calls follow each other for so long: a single small one would show how long Python takes to launch it."""
Patterned = tuple[Tensor, Tensor, int]
"""A tensor, the pattern that it must hold, and the number of the tensor's first element in that pattern."""


@dataclass
class Call:
    """One collective on one rank, ready to run.

    Attributes:
        run: Issue it, and wait for it.
        buffers: All its tensors.
        own: What one of them holds before it.
        expected: What some must hold after it.
    """

    run: Callable[[], object]
    buffers: Sequence[Tensor]
    own: Patterned
    expected: Sequence[Patterned]

    def clear(self) -> None:
        """Fill with zeros, which stay zeros however often a sum is repeated."""
        for tensor in self.buffers:
            tensor.zero_()

    def count_wrong(self) -> int:
        """Run it once; how many elements of this rank are not what they must be. NaN is wrong too."""
        self.clear()
        self.own[0].copy_(values(*self.own))
        self.run()
        wrong = sum(int((found[0] != values(*found)).sum()) for found in self.expected)
        self.clear()
        return wrong


def values(tensor: Tensor, pattern: Tensor, start: int) -> Tensor:
    """What `tensor` must hold, in its shape."""
    first = start % PERIOD
    return pattern.repeat(-(-(first + len(tensor)) // PERIOD))[first : first + len(tensor)]


@cache
def pattern_of(rank: int, dtype: torch.dtype, ranks: Ranks) -> Tensor:
    """Whole numbers from 0 whose sum over ranks is at most `LARGEST_EXACT`; zeros on ranks beyond that number."""
    most = LARGEST_EXACT // ranks.world_size or int(rank < LARGEST_EXACT)
    numbers = torch.randint(0, most + 1, (PERIOD,), generator=torch.Generator().manual_seed(rank))
    return numbers.to(dtype).to(ranks.device)


@cache
def pattern_of_sum(dtype: torch.dtype, ranks: Ranks) -> Tensor:
    return torch.stack([pattern_of(rank, torch.float32, ranks) for rank in range(ranks.world_size)]).sum(0).to(dtype)


def in_place(issue: Callable[[Tensor], object], is_sum: bool, count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    """Every rank ends with the sum, or with what the root had."""
    tensor = torch.empty(count, dtype=dtype, device=ranks.device)
    result = pattern_of_sum(dtype, ranks) if is_sum else pattern_of(ROOT, dtype, ranks)
    own = (tensor, pattern_of(ranks.rank, dtype, ranks), 0)
    return Call(lambda: issue(tensor), [tensor], own, [(tensor, result, 0)])


def gathering(issue: Callable[[Tensor, Tensor], object], count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    """Part i of every rank's result is rank i's shard.

    Args:
        issue: Takes the result and the shard, which is this rank's part of it already.
    """
    full = torch.empty(count, dtype=dtype, device=ranks.device)
    parts = full.chunk(ranks.world_size)
    expected = [(part, pattern_of(rank, dtype, ranks), rank * len(part)) for rank, part in enumerate(parts)]
    return Call(lambda: issue(full, parts[ranks.rank]), [full], expected[ranks.rank], expected)


def scattering(issue: Callable[[Tensor, Tensor], object], count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    """Rank i ends with part i of the sum."""
    full = torch.empty(count, dtype=dtype, device=ranks.device)
    shard = torch.empty(count // ranks.world_size, dtype=dtype, device=ranks.device)
    expected = (shard, pattern_of_sum(dtype, ranks), ranks.rank * len(shard))
    own = (full, pattern_of(ranks.rank, dtype, ranks), 0)
    return Call(lambda: issue(shard, full), [full, shard], own, [expected])


def all_to_all(count: int, dtype: torch.dtype, ranks: Ranks) -> Call:
    """Part i of rank k's input becomes part k of rank i's output."""
    sent, received = (torch.empty(count, dtype=dtype, device=ranks.device) for _ in range(2))
    parts = enumerate(received.chunk(ranks.world_size))
    expected = [(part, pattern_of(rank, dtype, ranks), ranks.rank * len(part)) for rank, part in parts]
    own = (sent, pattern_of(ranks.rank, dtype, ranks), 0)
    return Call(lambda: dist.all_to_all_single(received, sent), [sent, received], own, expected)


def own_all_gather(full: Tensor, shard: Tensor) -> None:
    project_all_gather(full, dist.group.WORLD).wait()


def own_reduce_scatter(shard: Tensor, full: Tensor) -> None:
    project_reduce_scatter(shard, full, dist.group.WORLD).wait()


CALLS: dict[str, Callable[[int, torch.dtype, Ranks], Call]] = {
    "all_reduce": partial(in_place, dist.all_reduce, True),
    "all_gather": partial(gathering, dist.all_gather_into_tensor),
    "sharding.all_gather": partial(gathering, own_all_gather),
    "reduce_scatter": partial(scattering, dist.reduce_scatter_tensor),
    "sharding.reduce_scatter": partial(scattering, own_reduce_scatter),
    "broadcast": partial(in_place, partial(dist.broadcast, src=ROOT), False),
    "all_to_all": all_to_all,
}
"""By name, in display order: the call with this number of elements on this rank, which the world size divides."""


def measured(
    collective: str, type_name: str, size: int, options: argparse.Namespace, ranks: Ranks, control: Any
) -> list[Any]:
    """The row of one size, in the order of `collectives.COLUMNS`, on every rank. Collective.

    Args:
        size: In bytes. It is made a multiple of an element for each rank.
        control: A group over the CPU, so that clocks and barriers do not queue on a GPU.

    Raises:
        RuntimeError: another rank is lost, or this one has too little memory.
    """
    dtype, is_cuda = DTYPES[type_name], ranks.device.type == "cuda"
    count = max(size // dtype.itemsize // ranks.world_size, 1) * ranks.world_size
    call = CALLS[collective](count, dtype, ranks)
    call.clear()
    call.run()
    (estimate,) = seconds_of(call, 1, 1, ranks, control)
    for _ in range(min(MOST_WARMUP, int(WARMUP_SHARE * options.seconds_per_size / estimate))):
        call.run()
    wrong = torch.tensor(call.count_wrong())
    dist.all_reduce(wrong, group=control)
    in_a_row = options.in_a_row or (min(max(int(IN_A_ROW_S / estimate), 1), MOST_IN_A_ROW) if is_cuda else 1)
    calls = min(max(int(options.seconds_per_size / estimate / in_a_row), FEWEST_CALLS), MOST_CALLS)
    median, p95 = np.percentile(seconds_of(call, calls, in_a_row, ranks, control), [50, 95]).tolist()
    size, link = count * dtype.itemsize, Link.parse(options.link)
    busbw = bus_factor(collective.removeprefix("sharding."), ranks.world_size) * size / median / 1e9
    where = [ranks.world_size, ranks.backend, ranks.device.type, link.bits_per_s if link else None]
    return [collective, *where, size, type_name, calls, 1e6 * median, 1e6 * p95, busbw, int(wrong)]


def seconds_of(call: Call, calls: int, in_a_row: int, ranks: Ranks, control: Any) -> list[float]:
    """Of each timed call on its slowest rank, from a start that all share; the mean of those in a row. Collective."""

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
