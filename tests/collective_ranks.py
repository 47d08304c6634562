"""The collective benchmark on one rank of the tests' pool, and faults to plant there. It imports what a rank does."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import collectives
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import OneRankError
from tests.checkpoints import here


def bench(folder: Path, flags: list[str], plant: Callable[[int], Any] | None = None) -> str:
    """Measure on this rank; rank 0 writes into `folder`. Returns the error's text, or "".

    Args:
        plant: Returns a context, for a rank, within which it measures.
    """
    torch.set_num_threads(1)
    ranks = here()
    defaults = ["--sizes", "1000,70K", "--seconds-per-size", "0.001", "--output-dir", str(folder)]
    options = collectives.build_parser().parse_args([*defaults, *flags])
    with plant(ranks.rank) if plant else nullcontext():
        try:
            collectives.measure_all(options, RunConfig(), ranks)
        except OneRankError as error:
            return str(error)
    return ""


def planted(name: str, plant: Callable[[torch.Tensor], None]):
    """Within this context, `plant` gets the output of each call of the collective `name`."""

    def issue(received: torch.Tensor, sent: torch.Tensor) -> None:
        original(received, sent)
        plant(received)

    original = collectives.CALLS[name]
    return mock.patch.dict(collectives.CALLS, {name: issue})


def three_elements(rank: int):
    """On rank 1, three elements of every all-reduce come out wrong."""
    return planted("all_reduce", lambda received: received[5:8].add_(1) if rank == 1 else None)


def connection_lost(rank: int):
    """`broadcast` fails after its first call. All ranks fail, so that the pool's connections stay usable."""
    working_calls = iter(range(1))

    def fail(received: torch.Tensor):
        if next(working_calls, None) is None:
            raise RuntimeError("Connection closed by peer\nand so on")

    return planted("broadcast", fail)
