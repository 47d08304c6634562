"""Schedules of a pipeline: in which order each rank computes forward and backward of its micro-batches.

With p ranks and m micro-batches, a rank has nothing to do while the first micro-batch comes to it, and while the last
one goes back to the ranks before it. This is the bubble. Time is counted in passes of one micro-batch through one rank:
forward takes F, backward B = I + W (gradients of inputs, and of weights). Ideally a step takes m (F + B).
"""

from collections.abc import Iterator

from pipeline_parallel.actions import Action, Compute, Kind, Shape


def gpipe(shape: Shape, rank: int) -> Iterator[Action]:
    """All forward passes, then all backward passes.

    Bubble: (p - 1)(F + B), of a step the share (p - 1) / (m + p - 1). Each rank holds the activations of all m
    micro-batches. Huang et al., 2019, "GPipe".
    """
    for micro_batch in range(shape.micro_batches):
        yield Action(Kind.FORWARD, rank, micro_batch)
    for micro_batch in range(shape.micro_batches):
        yield Action(Kind.BACKWARD, rank, micro_batch)


def one_f_one_b(shape: Shape, rank: int) -> Iterator[Action]:
    """A backward pass as soon as there can be one: then each rank alternates one forward, one backward (1F1B).

    Bubble: as GPipe's. But a rank holds the activations of p - rank micro-batches at most, however many there are.
    Narayanan et al., 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.
    """
    ahead = min(shape.ranks - 1 - rank, shape.micro_batches)
    for micro_batch in range(ahead):
        yield Action(Kind.FORWARD, rank, micro_batch)
    for micro_batch in range(shape.micro_batches):
        if ahead + micro_batch < shape.micro_batches:
            yield Action(Kind.FORWARD, rank, ahead + micro_batch)
        yield Action(Kind.BACKWARD, rank, micro_batch)


def interleaved(shape: Shape, rank: int) -> Iterator[Action]:
    """1F1B over v stages a rank: micro-batches go round p at a time, through stage `rank`, then `rank + p`, and so on.

    A stage is 1/v as long, so the bubble is (p - 1)(F + B) / v. The price: v times as many messages, and activations
    of p (v - 1) + 2 (p - rank - 1) + 1 passes, each 1/v as large. Narayanan et al., 2021, section 2.2.2.

    Where m is no multiple of p, a rank that turns to backward so early would wait for itself. Then all of forward is
    first, as in GPipe.
    """
    p, total = shape.ranks, shape.micro_batches * shape.stages_per_rank
    order = list(_rounds(shape))
    forward = [(chunk * p + rank, micro_batch) for chunk, micro_batch in order]
    backward = [((shape.stages_per_rank - 1 - chunk) * p + rank, micro_batch) for chunk, micro_batch in order]
    ahead = (shape.stages_per_rank - 1) * p + 2 * (p - 1 - rank)
    ahead = total if shape.micro_batches % p else min(ahead, total)
    for stage, micro_batch in forward[:ahead]:
        yield Action(Kind.FORWARD, stage, micro_batch)
    for index in range(total):
        if ahead + index < total:
            yield Action(Kind.FORWARD, *forward[ahead + index])
        yield Action(Kind.BACKWARD, *backward[index])


def _rounds(shape: Shape) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch): p micro-batches through the first chunk, the same through the next one, and so on."""
    for first in range(0, shape.micro_batches, shape.ranks):
        for chunk in range(shape.stages_per_rank):
            for micro_batch in range(first, min(first + shape.ranks, shape.micro_batches)):
                yield chunk, micro_batch


def zb_h1(shape: Shape, rank: int) -> Iterator[Action]:
    """1F1B with backward in two: gradients of weights wait until the rank would otherwise have nothing to do.

    Bubble: (p - 1)(F + I - W), a third of 1F1B's where F = I = W. A rank holds the activations of as many micro-batches
    as in 1F1B: p at most. Qi et al., 2023, "Zero Bubble Pipeline Parallelism", section 3.1.
    """
    for kind, stage, micro_batch in one_f_one_b(shape, rank):
        yield Action(Kind.BACKWARD_INPUT if kind is Kind.BACKWARD else kind, stage, micro_batch)
        if kind is Kind.BACKWARD and micro_batch >= rank:  # later on later ranks: the stage before waits for inputs
            yield Action(Kind.BACKWARD_WEIGHT, stage, micro_batch - rank)
    for micro_batch in range(max(0, shape.micro_batches - rank), shape.micro_batches):
        yield Action(Kind.BACKWARD_WEIGHT, rank, micro_batch)


SCHEDULES: dict[str, Compute] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}
