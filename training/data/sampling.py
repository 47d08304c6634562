"""Which rank sees which sample, and when: pure functions of index lists.

All ranks shuffle alike, cut the epoch into windows of one global batch, and share each window out. So the samples of
an optimizer step are the same at any world size, and the last window, which may be short, holds each sample once.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Collate = Callable[[list[Any]], dict[str, Tensor]]


def steps_in_epoch(samples: int, global_batch_size: int) -> int:
    """Optimizer steps in one pass over `samples`, the last of which may be short."""
    return -(-samples // global_batch_size)


def epoch_windows(samples: int, global_batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The sample indices of each optimizer step of an epoch, shuffled alike on every rank."""
    order = list(range(samples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return [order[start : start + global_batch_size] for start in range(0, samples, global_batch_size)]


def rank_micro_batches(window: Sequence[int], rank: int, size: int, micro_batch_size: int) -> list[list[int]]:
    """The part of `window` that data-parallel rank `rank` of `size` runs, in micro-batches; empty if none is left."""
    mine = window[rank::size]
    return [list(mine[start : start + micro_batch_size]) for start in range(0, len(mine), micro_batch_size)]


def evaluation_batches(samples: int, rank: int, size: int, batch_size: int) -> Iterator[tuple[list[int], int]]:
    """Batches of indices over `samples`, and how many of each batch count.

    Over all ranks each sample counts exactly once. Every rank gets the same number of batches, so that a strategy
    whose forward pass communicates can run them; a rank that has run out gets sample 0 with a count of 0.
    """
    largest_share = -(-samples // size)
    mine = list(range(rank, samples, size))
    for start in range(0, largest_share, batch_size):
        batch = mine[start : start + batch_size]
        yield (batch, len(batch)) if batch else ([0], 0)


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
