"""The collective benchmark on one rank of the tests' pool, and faults to plant there. It imports what a rank does."""

from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import collectives
from benchmarks.collective import loop, operations
from ddp_lab.runtime.distributed import Ranks

CPU = torch.device("cpu")


def options(*flags: str) -> Namespace:
    return collectives.parse(["--sizes", "1000,70K", "--iterations", "4", *flags])


def bench(folder: Path, flags: list[str], plant: Callable[[int], Any] | None = None) -> list[str]:
    """Measure on this rank. Rank 0 writes into `folder` and returns what was skipped, or the error.

    Args:
        plant: Given the rank, a context in which to measure.
    """
    torch.set_num_threads(1)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), CPU, "gloo")
    results = None
    if ranks.is_main:
        from benchmarks.collective.results import Results

        results = Results(folder / f"gloo_cpu_{ranks.world_size}_ranks.csv", ranks, None)
    with plant(ranks.rank) if plant else nullcontext():
        try:
            loop.measure_all(options(*flags), ranks, results)
        except loop.RanksLostError as error:
            return [str(error)]
    return results.skipped if results else []


def three_elements(rank: int) -> Any:
    """On rank 1, three elements of every all-reduce come out wrong."""

    def make(*arguments: Any) -> operations.Call:
        call = original.make(*arguments)
        if rank != 1:
            return call
        return replace(call, run=lambda: (call.run(), call.buffers[0][5:8].add_(1)))

    original = operations.OPERATIONS["all_reduce"]
    return mock.patch.dict(operations.OPERATIONS, {"all_reduce": replace(original, make=make)})


def connection_lost(rank: int) -> Any:
    """`reduce` fails after the first call, on all ranks, so that the pool's own connections stay as they are."""

    def make(*_: Any) -> operations.Call:
        calls = iter(range(1))

        def run() -> None:
            if next(calls, None) is None:
                raise RuntimeError("Connection closed by peer\nand so on")

        return operations.Call(run)

    return mock.patch.dict(operations.OPERATIONS, {"reduce": operations.Operation(make)})
