"""What a step is made of: the micro-batches of a rank, how much each of them weighs, and how far the step is. And which
rank is behind where a loop of the caller's own stands still, long before the group's timeout.

It mostly is a rank that runs fewer micro-batches or steps than others. Ranks tell their places only after a while in
which they have not moved, so a step costs nothing.
"""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

MicroBatch = Mapping[str, Tensor]
IGNORED = -100
"""The label of a token that is no target, as transformers has it."""


class StepData(NamedTuple):
    """What the training loop needs of one optimizer step.

    Attributes:
        samples: In the global batch.
        micro_batches: Of this rank.
        weights: For each micro-batch, what its loss is a mean over, such as its number of tokens. Default: its samples.
        tokens: In this rank's micro-batches; 0 if they hold no tokens.
    """

    samples: int
    micro_batches: Sequence[MicroBatch]
    weights: Sequence[float] | None = None
    tokens: int = 0


class Weighted(NamedTuple):
    """A micro-batch, and how many terms its loss is a mean over."""

    batch: MicroBatch
    weight: float


def weighted(micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None) -> list[Weighted]:
    """Those micro-batches that are not empty, with their weights, by default their numbers of samples."""
    if weights is None:
        weights = [sample_count(batch) for batch in micro_batches]
    return [Weighted(batch, weight) for batch, weight in zip(micro_batches, weights, strict=True) if weight]


def sample_count(micro_batch: MicroBatch) -> int:
    """Samples in a micro-batch: dimension 0 of its first tensor."""
    return next(iter(micro_batch.values())).shape[0]


def first_bad_sample(micro_batches: Sequence[Weighted]) -> int:
    """The number of the first sample that holds NaN or infinity; -1 if none does. Masks may hold -infinity."""
    before = 0
    for batch, _ in micro_batches:
        values = [tensor for tensor in batch.values() if tensor.is_floating_point() and tensor.dim()]
        bad = [(tensor.isnan() | tensor.isposinf()).reshape(len(tensor), -1).any(1).nonzero() for tensor in values]
        if rows := [int(samples[0]) for samples in bad if len(samples)]:
            return before + min(rows)
        before += sample_count(batch)
    return -1


class Progress:
    """Where the optimizer step is. The loop writes this, and strategies read it.

    Attributes:
        is_ahead: Forward passes run before the first micro-batch (`model_parallel.Balance`).
        in_micro_batch: Between the beginning of forward and the end of `after_backward`.
        another_follows: This micro-batch is not the last of its step.
        reduces_now: The gradients of this micro-batch are to be reduced: it is the last one, or the strategy reduces
            all (`reduces_every_micro_batch`). Never outside of micro-batches.
        counts_gradients: A gradient counts for its bucket to be complete. In a pipeline those of a bucket may come in
            several backward passes, and count when they are their parameters' last ones in the step.
        averages: Reductions of this step average gradients over ranks, instead of adding them up.
        stops_after: As soon as any rank wants to stop: the number of optimizer steps after which all should.
    """

    is_ahead = in_micro_batch = another_follows = reduces_now = False
    averages = counts_gradients = True
    stops_after: int | None = None


# The rank that is behind where a loop of the caller's own stands still ------------------------------------------------


PATIENCE_S = 30.0

_places: WeakSet["TrainingPlace"] = WeakSet()
_numbers = count()
_looking = threading.Lock()
"""Held while a thread reads places: an old thread may still run when a new one begins, and a line is printed once."""


class TrainingPlace:
    """The place of this rank in the training.

    Attributes:
        at: Optimizer steps done, and micro-batches of the next one that have begun.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.at = self._latest = (0, 0)
        self._group, self._since, self._is_printed = group, time.monotonic(), False
        self._prefix = f"ddp-lab/places/{next(_numbers)}"
        self._store: dist.Store | None = None  # while this rank does not move, its place is there
        _places.add(self)
        if len(_places) == 1:
            threading.Thread(target=_look, name="places", daemon=True).start()

    def move(self, steps: int) -> None:
        """The next micro-batch begins, after so many optimizer steps."""
        self.at = steps, 1 + (self.at[1] if self.at[0] == steps else 0)

    def look(self) -> None:
        """Runs now and then. Rank 0 prints once which rank is behind."""
        rank, now = self._group.rank(), time.monotonic()
        if self.at != self._latest:
            if self._store is not None:
                self._store.delete_key(str(rank))
            self._latest, self._since, self._is_printed, self._store = self.at, now, False, None
        elif now - self._since > PATIENCE_S and not self._is_printed:
            if self._store is None:
                self._store = dist.PrefixStore(self._prefix, _get_default_store().clone())
                self._store.set(str(rank), "{} {}".format(*self.at))
            keys = [str(rank) for rank in range(self._group.size())]
            if rank == 0 and self._store.check(keys):
                line = warning_of([tuple(map(int, self._store.get(key).split())) for key in keys])
                self._is_printed = bool(line)
                if line:
                    print(f"warning: for {now - self._since:.0f} s, {line}", file=sys.stderr, flush=True)


def warning_of(places: Sequence[tuple[int, ...]]) -> str:
    """A warning of the slowest rank, by each rank's `TrainingPlace.at`; empty if all are in the same place."""
    last, first = min(places), max(places)
    if last == first:
        return ""
    slow, fast = places.index(last), places.index(first)
    return (
        f"rank {slow} is behind: it has done {last[0]} steps and begun {last[1]} micro-batches of the next, and rank "
        f"{fast} {first[0]} and {first[1]}; each rank must run as many steps, and micro-batches in them, as the others"
    )


def _look() -> None:
    while _places:
        time.sleep(PATIENCE_S / 6)
        for place in [*_places]:
            with _looking, suppress(RuntimeError, ValueError):  # the group or its store has gone
                place.look()
