"""What a step is made of: the micro-batches of a rank, how much each of them weighs, and how far the step is."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

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
    """The first sample, counted over these, that holds NaN or infinity; -1 if none does. Masks may hold -infinity."""
    before = 0
    for batch, _ in micro_batches:
        values = [tensor for tensor in batch.values() if tensor.is_floating_point() and tensor.dim()]
        bad = [(each.isnan() | each.isposinf()).reshape(len(each), -1).any(1).nonzero() for each in values]
        if rows := [int(each[0]) for each in bad if len(each)]:
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
