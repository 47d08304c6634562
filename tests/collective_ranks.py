"""The collective benchmark on one rank of the tests' pool, and faults to plant there. It imports what a rank does."""

import json
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import collective_loop, collectives, operations
from training.distributed import Ranks

CPU = torch.device("cpu")


def options(*flags: str) -> Namespace:
    return collectives.parse(["--sizes", "1000,70K", "--iterations", "4", *flags])


def bench(folder: Path, flags: list[str], plant: Callable[[int], Any] | None = None) -> list[str]:
    """Measure on this rank; rank 0 writes into `folder`, and answers with what was skipped, or with the error.

    Args:
        plant: Given the rank, a context in which to measure.
    """
    torch.set_num_threads(1)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), CPU, "gloo")
    results = None
    if ranks.is_main:
        from benchmarks.collective_results import Results

        results = Results(folder / f"gloo_cpu_{ranks.world_size}_ranks", ranks, {})
    with plant(ranks.rank) if plant else nullcontext():
        try:
            collective_loop.measure_all(options(*flags), ranks, results)
        except collective_loop.RanksLostError as error:
            return [str(error)]
    if results is None:
        return []
    results.write(complete=True)
    return json.loads(results.path.with_suffix(".json").read_text())["skipped"]


def damaged(rank: int, name: str, damage: Callable[[torch.Tensor], object]) -> Any:
    """A context in which rank 1's copy of what `name` answered is damaged after every call."""

    def make(*arguments: Any) -> operations.Call:
        call = original.make(*arguments)
        whole = call.run

        def run() -> None:
            whole()
            damage(call.buffers[0])

        return replace(call, run=run) if rank == 1 else call

    original = operations.OPERATIONS[name]
    return mock.patch.dict(operations.OPERATIONS, {name: replace(original, make=make)})


def three_elements(rank: int) -> Any:
    return damaged(rank, "all_reduce", lambda tensor: tensor[5:8].add_(1))


def two_ranks_swapped(rank: int) -> Any:
    """Each in the other's place, as if ranks were numbered otherwise."""
    return damaged(rank, "all_gather", lambda full: full.copy_(full.roll(len(full) // 2)))


def no_number(rank: int) -> Any:
    return damaged(rank, "broadcast", lambda tensor: tensor[0].fill_(float("nan")))


def little_memory(rank: int) -> Any:
    return mock.patch.object(collective_loop, "available_memory", lambda: 100_000 if rank == 1 else None)


def unsupported(rank: int) -> Any:
    def make(*_: Any) -> operations.Call:
        raise RuntimeError("no such thing\nand so on")

    return mock.patch.dict(operations.OPERATIONS, {"reduce": operations.Operation(make)})


def connection_lost(rank: int) -> Any:
    """After the first call of reduce, on all ranks, so that the pool's own connections stay as they are."""

    def make(*arguments: Any) -> operations.Call:
        calls = iter([lambda: None])

        def run() -> None:
            if next(calls, None) is None:
                raise RuntimeError("Connection closed by peer\nand so on")

        return operations.Call(run)

    return mock.patch.dict(operations.OPERATIONS, {"reduce": operations.Operation(make)})
