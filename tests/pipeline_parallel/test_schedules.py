"""Schedules on paper: no rank waits for ever, neighbours agree on the order, bubbles and memory are as announced."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_parallel.actions import SENT, Kind, Shape, source_of
from pipeline_parallel.checks import lists_of, run_on_paper
from pipeline_parallel.schedules import SCHEDULES

shapes = st.builds(Shape, st.integers(1, 8), st.integers(1, 16), st.just(1))
BUBBLES = {"gpipe": 3, "1f1b": 3, "interleaved": 3, "zb-h1": 1}
"""In units of p - 1 forward passes; a backward pass takes two. Of `interleaved`, divided by v."""


def most_in_flight(actions):
    """The most passes whose activations a rank holds at a time: from forward to the end of backward."""
    passes = peak = 0
    splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
    for action in actions:
        passes += action.kind is Kind.FORWARD
        peak = max(peak, passes)
        passes -= action.kind is (Kind.BACKWARD_WEIGHT if splits else Kind.BACKWARD)
    return peak


def require_whole(lists, shape):
    """Each pass occurs once, on the rank of its stage, forward before backward. In each direction, neighbours send and
    receive in one order."""
    for rank, actions in enumerate(lists):
        passes = defaultdict(list)
        for kind, *place in actions:
            if kind.computes:
                passes[*place].append(kind)
        splits = any(Kind.BACKWARD_WEIGHT in kinds for kinds in passes.values())
        kinds = [Kind.FORWARD, *([Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if splits else [Kind.BACKWARD])]
        stages = range(rank, shape.stages, shape.ranks)
        assert passes == {(stage, number): kinds for stage in stages for number in range(shape.micro_batches)}
        for received_kind, (_, distance) in SENT.items():
            received = [source_of(action) for action in actions if action.kind is received_kind]
            neighbour = lists[(rank + distance) % shape.ranks]
            assert received == [action for action in neighbour if action in set(received)], f"order of rank {rank}"


@pytest.mark.parametrize("name", SCHEDULES)
@given(shape=shapes, chunks=st.integers(2, 4))
def test_every_schedule_on_paper(name, shape, chunks):
    if name == "interleaved":
        shape = shape._replace(stages_per_rank=chunks)
    lists = lists_of(SCHEDULES[name], shape)
    require_whole(lists, shape)
    length = run_on_paper(lists, shape).length  # raises where ranks wait for ever
    is_full = shape.micro_batches >= shape.ranks and shape.micro_batches % shape.ranks == 0
    if is_full or name in ("gpipe", "1f1b"):
        expected = 3 * shape.micro_batches + BUBBLES[name] * (shape.ranks - 1) / shape.stages_per_rank
        assert length == pytest.approx(expected)


@given(shape=shapes)
def test_what_is_in_flight(shape):
    peaks = {
        name: [most_in_flight(of_rank) for of_rank in lists_of(SCHEDULES[name], shape)]
        for name in ("gpipe", "1f1b", "zb-h1")
    }
    assert peaks["gpipe"] == [shape.micro_batches] * shape.ranks
    assert peaks["1f1b"] == [min(shape.ranks - rank, shape.micro_batches) for rank in range(shape.ranks)]
    assert max(peaks["zb-h1"]) == max(peaks["1f1b"])


@given(shape=shapes, chunks=st.integers(2, 4), rounds=st.integers(1, 3))
def test_what_is_in_flight_interleaved(shape, chunks, rounds):
    shape = Shape(shape.ranks, shape.ranks * rounds, chunks)
    passes = shape.micro_batches * chunks
    for rank, actions in enumerate(lists_of(SCHEDULES["interleaved"], shape)):
        expected = shape.ranks * (chunks - 1) + 2 * (shape.ranks - rank - 1) + 1
        assert most_in_flight(actions) == min(expected, passes)


def test_a_rank_that_would_wait_for_itself_is_named():
    shape = Shape(2, 2)
    first, second = lists_of(SCHEDULES["1f1b"], shape)
    backward_first = [first[-1], *first[:-1]]
    with pytest.raises(ValueError, match=r"waits for itself: rank 0 at B0\.1"):
        run_on_paper([backward_first, second], shape)
