"""The collective benchmark on one rank of the tests' pool, and faults to plant there. It imports what a rank does."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import calls, collectives
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.errors import OneRankError


def bench(folder: Path, flags: list[str], plant: Callable[[int], Any] | None = None) -> str:
    """Measure on this rank; rank 0 writes into `folder`. The error, if there was one.

    Args:
        plant: Given the rank, a context in which to measure.
    """
    torch.set_num_threads(1)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    usual = ["--sizes", "1000,70K", "--seconds-per-size", "0.001", "--output-dir", str(folder)]
    options = collectives.build_parser().parse_args([*usual, *flags])
    with plant(ranks.rank) if plant else nullcontext():
        try:
            collectives.measure_all(options, ranks)
        except OneRankError as error:
            return str(error)
    return ""


def planted(name: str, plant: Callable[[calls.Call], None]):
    """Within this context, `plant` runs after each call of a collective."""

    def make(*arguments) -> calls.Call:
        call = original(*arguments)
        return replace(call, run=lambda: (call.run(), plant(call)))

    original = calls.CALLS[name]
    return mock.patch.dict(calls.CALLS, {name: make})


def three_elements(rank: int):
    """On rank 1, three elements of every all-reduce come out wrong."""
    return planted("all_reduce", lambda call: call.buffers[0][5:8].add_(1) if rank == 1 else None)


def connection_lost(rank: int):
    """`broadcast` fails after the first call, on all ranks, so that the pool's own connections stay as they are."""
    left = iter(range(1))

    def fail(call: calls.Call):
        if next(left, None) is None:
            raise RuntimeError("Connection closed by peer\nand so on")

    return planted("broadcast", fail)
