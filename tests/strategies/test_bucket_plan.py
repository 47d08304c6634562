"""The pure part of buckets that fit the link, against trying every way to cut, and against figures made by hand."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp import link_fit
from ddp.bucket_plan import MOST_PIECES, Cost, Timeline, choose, coarse_ends, describe, finish_time, plan, usual_ends
from tests.tables import each_row


def line(latency: float, per_byte: float):
    return lambda payload: latency + per_byte * payload


def may_be_a_bucket(timeline: Timeline, start: int, end: int) -> bool:
    """Of one kind, and of one gradient or not too long."""
    seconds = timeline.cost(np.array([sum(timeline.payload[start:end])], dtype=float))[0]
    return len(set(timeline.kind[start:end])) == 1 and (end == start + 1 or seconds <= timeline.longest)


def every_way(timeline: Timeline) -> list[tuple[int, ...]]:
    """All bucketings that are allowed."""
    count = len(timeline.payload)
    cuts = [c for size in range(count) for c in combinations(range(1, count), size)]
    bucketings = [(*cut, count) for cut in cuts]
    return [
        ends for ends in bucketings if all(may_be_a_bucket(timeline, start, end) for start, end in pairwise((0, *ends)))
    ]


seconds = st.integers(0, 40).map(lambda value: value / 4)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    count = draw(st.integers(1, 7))
    latency, per_byte, extra = draw(seconds), draw(seconds) / 8, draw(seconds)
    return Timeline(
        ready=np.cumsum(draw(st.lists(seconds, min_size=count, max_size=count))).tolist(),
        payload=draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)),
        kind=draw(st.lists(st.sampled_from("ab"), min_size=count, max_size=count)),
        cost=lambda payload: latency + per_byte * payload + extra * (payload > 6),  # an algorithm that changes
        tail=line(draw(seconds), draw(seconds) / 8),
        update=line(0, draw(seconds) / 8),
        overhead=draw(seconds) / 8,
        longest=draw(st.sampled_from([0.0, 5.0, 20.0, float("inf")])),
    )


@given(timelines())
def test_nothing_is_better_than_the_plan(timeline: Timeline) -> None:
    ends = plan(timeline)
    ways = every_way(timeline)
    assert tuple(ends) in ways
    best = min(finish_time(timeline, way) for way in ways)
    assert finish_time(timeline, ends) == pytest.approx(best, abs=1e-9)


BY_HAND = {
    "a link without latency: one bucket each": (
        Timeline([0, 1, 2], [4, 4, 4], "aaa", line(0, 0.25)),
        {(3,): 2 + 3, (1, 2, 3): 3},
        [1, 2, 3],
    ),
    "a latency of 2 s: of equal ones, the fewest buckets": (
        Timeline([0, 1, 2], [4, 4, 4], "aaa", line(2, 0.25)),
        {(3,): 2 + 5, (1, 3): 3 + 4, (2, 3): 5 + 3, (1, 2, 3): 9},
        [3],
    ),
    "a small last bucket, where nothing hides that the link rests behind it": (
        Timeline([0, 0, 0], [4, 2, 2], "aaa", line(0, 1), tail=line(0, 0.5)),
        {(2, 3): 6 + 2 + 1, (3,): 8 + 4},
        [2, 3],
    ),
    "the first half is updated while the second is reduced": (
        Timeline([2, 2], [2, 2], "aa", line(0, 1), update=line(0, 1)),
        {(2,): 2 + 4 + 4, (1, 2): 2 + 2 + 2 + 2},
        [1, 2],
    ),
    "a bucket must pay off: reduced 1 s sooner is not worth 2 s": (
        Timeline([0, 1], [1, 1], "aa", line(0, 1), overhead=2),
        {(1, 2): 2 + 4, (2,): 3 + 2},
        [2],
    ),
    "updates wait for the end of backward, which reads the parameters": (
        Timeline([0, 5], [1, 1], "aa", line(0, 1), update=line(0, 1)),
        {(1, 2): 5 + 1 + 1},
        [1, 2],
    ),
}


@each_row("timeline, finishes, best", BY_HAND.values())
def test_by_hand(timeline: Timeline, finishes: dict[tuple[int, ...], float], best: list[int]) -> None:
    """When gradients are ready, their bytes, and what bytes cost; when each bucketing is done, and the plan."""
    assert {ends: finish_time(timeline, ends) for ends in finishes} == finishes
    assert plan(timeline) == best


def test_many_gradients_are_planned_in_pieces() -> None:
    payload = [1000 if index % 9 == 0 else 1 for index in range(2000)]
    timeline = Timeline(list(range(2000)), payload, ["a"] * 1000 + ["b"] * 1000, line(0.5, 0.001))
    ends = coarse_ends(timeline)
    assert ends[-1] == 2000 and 1000 in ends and len(ends) <= MOST_PIECES + 2
    planned = plan(timeline)
    assert set(planned) <= set(ends) and 1000 in planned and planned[-1] == 2000


def test_the_plan_in_words() -> None:
    mib = 2**20
    timeline = Timeline([0, 0.1], [20 * mib, 20 * mib], "aa", line(0, 0.1 / mib / 20))
    assert describe(timeline, [1, 2]) == (
        "2 buckets of 20.00 to 20.00 MiB fit this link: all are predicted to be done 200.0 ms after the first "
        "gradient; buckets of 25 MiB, after 200.0 ms"
    )


# Fitted on pretended links -------------------------------------------------------------------------------------------


class PretendedLink:
    """All-reduces in turn on one stream: each begins when the host has issued it and the one before is done."""

    def __init__(self, issue_s: float, latency_s: float, bytes_per_s: float) -> None:
        self.issue_s, self.latency_s, self.bytes_per_s = issue_s, latency_s, bytes_per_s

    def occupied_s(self, payload: np.ndarray) -> np.ndarray:
        return self.latency_s + payload / self.bytes_per_s

    def timed(self, pieces: Sequence[torch.Tensor], *_: object) -> float:
        """As `ddp.link_fit.timed`."""
        end = 0.0
        for number, piece in enumerate(pieces, start=1):
            end = max(end, number * self.issue_s) + float(self.occupied_s(np.array(piece.nbytes)))
        return end


LINKS = {
    "NVLink": PretendedLink(30e-6, 15e-6, 300e9),
    "PCIe": PretendedLink(30e-6, 20e-6, 20e9),
    "10 Gbit/s": PretendedLink(30e-6, 60e-6, 1.1e9),
    "1 Gbit/s": PretendedLink(30e-6, 100e-6, 0.11e9),
    "250 Mbit/s": PretendedLink(30e-6, 300e-6, 0.03e9),
}


@cache
def measured(link: PretendedLink) -> tuple[Cost, Cost, bool]:
    """As `ddp.link_fit.measure_all_reduce`."""
    with mock.patch.object(link_fit, "timed", link.timed), mock.patch.object(link_fit.dist, "all_reduce"):
        return link_fit.measure_all_reduce(None, torch.device("cpu"), None)


def fitted_ends(link: PretendedLink, ready: Sequence[float], payload: Sequence[int]) -> tuple[list[int], Timeline]:
    """What the strategy would decide on this link, and the timeline as it really is."""
    real = Timeline(ready, payload, ["one"] * len(payload), link.occupied_s, longest=0.3 * max(ready))
    cost, tail, is_known = measured(link)
    if not is_known:
        return usual_ends(real), real
    seen = replace(real, cost=cost, tail=tail, overhead=link_fit.OVERHEAD * max(ready))
    return choose(seen), real


@pytest.mark.parametrize("name", LINKS)
@given(
    st.lists(st.integers(10_000, 60_000_000), min_size=2, max_size=60),
    st.floats(1e-3, 1.0),
)
def test_fitted_buckets_are_never_worse_than_the_usual_ones(name: str, payload: list[int], backward_s: float) -> None:
    ready = (np.cumsum(payload) / sum(payload) * backward_s).tolist()
    ends, real = fitted_ends(LINKS[name], ready, payload)
    assert finish_time(real, ends) <= 1.02 * finish_time(real, usual_ends(real))


@each_row("name", LINKS)
def test_a_byte_costs_what_it_does(name: str) -> None:
    """On NVLink the probe must be large, and elsewhere it may not take long."""
    link, taken = LINKS[name], []

    def timed(*args: object) -> float:
        taken.append(link.timed(*args))
        return taken[-1]

    with mock.patch.object(link_fit, "timed", timed), mock.patch.object(link_fit.dist, "all_reduce"):
        cost, _, is_known = link_fit.measure_all_reduce(None, torch.device("cpu"), None)
    assert is_known
    assert float(cost(np.array(2.0**28))) == pytest.approx(float(link.occupied_s(np.array(2.0**28))), rel=0.1)
    assert sum(taken) < 4.0
