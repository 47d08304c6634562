"""Which rank gets which sample in which step: pure functions of index lists.

All ranks shuffle in the same way, cut the epoch into windows of one global batch, and divide each window among them. So
an optimizer step has the same samples for any number of ranks. The last window of an epoch may be short.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

Collate = Callable[[list[Any]], dict[str, Tensor]]


def steps_in_epoch(samples: int, global_batch_size: int) -> int:
    """Optimizer steps in one pass over `samples`. The last step may have fewer samples."""
    return -(-samples // global_batch_size)


def epoch_windows(samples: int, global_batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The sample indices of each optimizer step of an epoch, the same on every rank."""
    order = list(range(samples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return [order[start : start + global_batch_size] for start in range(0, samples, global_batch_size)]


def rank_micro_batches(window: Sequence[int], rank: int, size: int, micro_batch_size: int) -> list[list[int]]:
    """The part of `window` that data-parallel rank `rank` of `size` runs, in micro-batches. It may be empty."""
    mine = window[rank::size]
    return [list(mine[start : start + micro_batch_size]) for start in range(0, len(mine), micro_batch_size)]


def evaluation_batches(samples: int, rank: int, size: int, batch_size: int) -> Iterator[tuple[list[int], int]]:
    """For each batch of this rank, its sample indices, and how many of them count.

    Over all ranks each sample counts exactly once. Every rank gets the same number of batches, because the forward
    pass of some strategies communicates. A rank without samples left gets sample 0 with a count of 0.
    """
    largest_share = -(-samples // size)
    mine = list(range(rank, samples, size))
    for start in range(0, largest_share, batch_size):
        batch = mine[start : start + batch_size]
        yield (batch, len(batch)) if batch else ([0], 0)
