"""The pure part of buckets that fit the link, against trying every way to cut, and against figures made by hand."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.bucket_plan import MOST_PIECES, Timeline, coarse_ends, describe, finish_time, plan


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


def test_by_hand() -> None:
    """Ready at 0, 1 and 2 s; 4 bytes each at 0.25 s a byte.

    One bucket: 2 + 3. One each: busy from 0 on, 3. With a latency of 2 s: one bucket 2 + 5 = 7; one each 9; the first
    alone, then both others: 0 + 3, then 3 + 4 = 7; the first two, then the last: 1 + 4, then 5 + 3 = 8.
    """
    free = Timeline([0, 1, 2], [4, 4, 4], "aaa", line(0, 0.25))
    assert plan(free) == [1, 2, 3] and finish_time(free, [1, 2, 3]) == 3 and finish_time(free, [3]) == 5
    late = Timeline([0, 1, 2], [4, 4, 4], "aaa", line(2, 0.25))
    assert finish_time(late, [3]) == 7 and finish_time(late, [1, 2, 3]) == 9
    assert finish_time(late, [1, 3]) == 7 and finish_time(late, [2, 3]) == 8
    assert plan(late) == [3], "of equal ones, the fewest buckets"


def test_the_last_bucket_is_small_where_nothing_hides_its_tail() -> None:
    """All is ready at once and takes 8 s in any case; behind the last bucket the link rests half as long again."""
    timeline = Timeline([0, 0, 0], [4, 2, 2], "aaa", line(0, 1), tail=line(0, 0.5))
    assert plan(timeline) == [2, 3] and finish_time(timeline, [2, 3]) == 9 and finish_time(timeline, [3]) == 12


def test_updates_follow_bucket_by_bucket() -> None:
    """All is ready at 2 s, a byte takes 1 s to reduce and as long to update: 4 bytes at once are done at 2 + 4 + 4, two
    halves at 2 + 2 + 2 + 2, since the first is updated while the second is reduced.
    """
    timeline = Timeline([2, 2], [2, 2], "aa", line(0, 1), update=line(0, 1))
    assert finish_time(timeline, [2]) == 10 and finish_time(timeline, [1, 2]) == 8 and plan(timeline) == [1, 2]


def test_a_bucket_must_pay_off() -> None:
    """Two buckets are reduced 1 s sooner than one; that is not worth 2 s."""
    timeline = Timeline([0, 1], [1, 1], "aa", line(0, 1), overhead=2)
    assert finish_time(timeline, [1, 2]) == 2 + 4 and finish_time(timeline, [2]) == 3 + 2 and plan(timeline) == [2]


def test_updates_wait_for_the_end_of_backward() -> None:
    """The first bucket is reduced at 1 s, but backward, which reads its parameters, goes on until 5 s."""
    timeline = Timeline([0, 5], [1, 1], "aa", line(0, 1), update=line(0, 1))
    assert finish_time(timeline, [1, 2]) == 7


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
