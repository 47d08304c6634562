"""Which gradients to all-reduce together, given when each is ready and what an all-reduce costs on this link.

Pure functions: numbers in, boundaries out. The model is a queue with one server, the link. Backward makes gradient i at
`ready[i]`. A bucket starts when its last gradient is there and the bucket before it has left the link, and occupies the
link for `cost(bytes)`. The latency of one collective overlaps with the next one. The last has no next one, and takes
`tail(bytes)` longer. If parameters are updated bucket by bucket, the optimizer is a second server behind the first: it
begins when backward has ended, and takes `update(bytes)`.

Small buckets start early and leave little after backward; large buckets pay fewer latencies. So if the link is the
bottleneck, the first and the last bucket are small. If backward is the bottleneck, the last bucket is small and there
are few in all. No bucket of several gradients may occupy the link for more than `longest`: a thread that starts a
collective may come late on a busy machine, and other buckets then keep the link busy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

USUAL_BYTES = 25 * 2**20
"""PyTorch DDP's default."""
LEAST_GAIN = 0.02
"""The share of the time until all buckets are done that a plan must save. Less is within the error of what it is made
of."""
MOST_PIECES = 96
"""Gradients are planned in about this many pieces at most; small neighbours form one piece."""
Cost = Callable[[np.ndarray], np.ndarray]
"""Bytes of several buckets -> seconds of each."""


def nothing(payload: np.ndarray) -> np.ndarray:
    """No seconds, whatever the bytes."""
    return np.zeros_like(payload)


@dataclass(frozen=True)
class Timeline:
    """What a plan is made for. Sequences have one value a gradient, in the order in which gradients become ready.

    Attributes:
        ready: Seconds at which backward has made the gradient; non-decreasing.
        payload: Bytes.
        kind: Gradients of different kinds (dtype, device) cannot share a bucket.
        cost: Seconds for which an all-reduce occupies the link, by its bytes.
        tail: Additional seconds of the last bucket, by its bytes.
        update: Seconds that the optimizer takes for a bucket, if it updates one while others are being reduced.
        longest: Seconds for which a bucket of several gradients may occupy the link.
        overhead: Seconds that each bucket costs backward and optimizer, whatever the link does.
    """

    ready: Sequence[float]
    payload: Sequence[int]
    kind: Sequence[object]
    cost: Cost
    tail: Cost = nothing
    update: Cost = nothing
    longest: float = float("inf")
    overhead: float = 0.0


class State(NamedTuple):
    """Buckets over the first gradients, as far as later buckets depend on them. Less is better in all fields.

    Attributes:
        done: Seconds at which all these buckets are reduced (and updated, if they are updated one by one).
        free: Seconds at which the link is free.
        ends: Of each bucket, the index after its last gradient.
    """

    done: float
    free: float
    ends: tuple[int, ...]


START = State(0.0, 0.0, ())


def with_buckets(states: Sequence[State], starts: Sequence[int], end: int, timeline: Timeline) -> list[State]:
    """Each of `states`, which end where `starts` say, after another bucket that ends before gradient `end`."""
    sums = np.concatenate([[0], np.cumsum(timeline.payload)])
    payload = sums[end] - sums[list(starts)].astype(float)
    is_last = end == len(timeline.payload)
    cost, update = timeline.cost(payload).tolist(), timeline.update(payload).tolist()
    tail = timeline.tail(payload).tolist() if is_last else [0.0] * len(states)
    found = []
    for index, state in enumerate(states):
        free = max(state.free, timeline.ready[end - 1]) + cost[index]
        done = max(state.done, free + tail[index])
        if update[index]:
            done = max(done, timeline.ready[-1]) + update[index]
        found.append(State(done, free, (*state.ends, end)))
    return found


def finish_time(timeline: Timeline, ends: Sequence[int]) -> float:
    """Seconds at which the last bucket is done, overheads added. `ends`: of each, the index after its last gradient."""
    state = START
    for start, end in pairwise([0, *ends]):
        (state,) = with_buckets([state], [start], end, timeline)
    return state.done + timeline.overhead * len(ends)


def plan(timeline: Timeline) -> list[int]:
    """The boundaries with the least `finish_time`, and of those with the same, the fewest buckets.

    Dynamic programming over prefixes. What follows a prefix depends only on the two times of its `State`, and is never
    better for a later one. So of all bucketings of a prefix, only those are kept that no other beats in both times and
    in the number of buckets. Exact for the pieces of `coarse_ends`.

    Returns:
        Of each bucket, the index after its last gradient.
    """
    ends = coarse_ends(timeline)
    sums = np.concatenate([[0], np.cumsum(timeline.payload)])
    best: dict[int, list[State]] = {0: [START]}
    for place, end in enumerate(ends):
        kind = timeline.kind[end - 1]
        first = place
        while first > 0 and timeline.kind[ends[first - 1] - 1] == kind:
            first -= 1
        starts_of_kind = np.array([0, *ends][first : place + 1])
        short = timeline.cost((sums[end] - sums[starts_of_kind]).astype(float)) <= timeline.longest
        short[-1] = True  # one piece, however large
        before = [(state, start) for start in starts_of_kind[short].tolist() for state in best[start]]
        states, starts = zip(*before, strict=True)
        best[end] = undominated(with_buckets(states, starts, end, timeline))

    def finish(state: State) -> tuple[float, int]:
        return state.done + timeline.overhead * len(state.ends), len(state.ends)

    return list(min(best[ends[-1]], key=finish).ends)


def undominated(states: Sequence[State]) -> list[State]:
    """Those that no other beats in both times and in the number of buckets."""
    kept: list[State] = []
    for state in sorted(states, key=lambda state: (state.done, state.free, len(state.ends))):
        if not any(other.free <= state.free and len(other.ends) <= len(state.ends) for other in kept):
            kept.append(state)
    return kept


def coarse_ends(timeline: Timeline) -> list[int]:
    """Where a bucket may end: after every gradient; if there are many, after groups of small neighbours."""
    least = sum(timeline.payload) / MOST_PIECES if len(timeline.payload) > MOST_PIECES else 0
    ends: list[int] = []
    held = 0
    for index, payload in enumerate(timeline.payload):
        held += payload
        is_last = index + 1 == len(timeline.payload)
        if is_last or held >= least or timeline.kind[index + 1] != timeline.kind[index]:
            ends.append(index + 1)
            held = 0
    return ends


def usual_ends(timeline: Timeline) -> list[int]:
    """The boundaries of buckets of the usual size."""
    ends: list[int] = []
    held = 0
    for index, payload in enumerate(timeline.payload):
        if held and (held + payload > USUAL_BYTES or timeline.kind[index] != timeline.kind[index - 1]):
            ends.append(index)
            held = 0
        held += payload
    return [*ends, len(timeline.payload)]


def choose(timeline: Timeline) -> list[int]:
    """The boundaries of `plan`, if they are predicted to be worth it; otherwise those of the usual size."""
    planned, usual = plan(timeline), usual_ends(timeline)
    return planned if finish_time(timeline, planned) < (1 - LEAST_GAIN) * finish_time(timeline, usual) else usual


def describe(timeline: Timeline, ends: Sequence[int]) -> str:
    """A plan in one sentence, compared with buckets of the usual size."""
    sizes = [sum(timeline.payload[start:end]) / 2**20 for start, end in pairwise([0, *ends])]
    usual = usual_ends(timeline)
    planned, otherwise = finish_time(timeline, ends), finish_time(timeline, usual)
    if len(sizes) == 1:
        shape = f"1 bucket of {sizes[0]:.2f} MiB fits"
    else:
        shape = f"{len(sizes)} buckets of {min(sizes):.2f} to {max(sizes):.2f} MiB fit"
    return (
        f"{shape} this link: all are predicted to be done {1000 * planned:.1f} ms after the first gradient; "
        f"buckets of {USUAL_BYTES // 2**20} MiB, after {1000 * otherwise:.1f} ms"
    )
