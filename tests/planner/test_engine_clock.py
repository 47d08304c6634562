"""The planner's clock, against sums that can be done by hand and bounds that hold for any set of collectives."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.clock import Clock, Queue
from planner.contracts import CollectiveCost, Contention

seconds = st.floats(0.0, 10.0).map(lambda value: round(value, 3))
links = st.sampled_from(["inside", "between"])
costs = st.builds(CollectiveCost, seconds, seconds, links, idle_s=seconds)
factors = st.floats(1.0, 3.0)
CLOSE = 1e-9


def cost(latency: float, transfer: float, link: str = "link") -> CollectiveCost:
    return CollectiveCost(latency, transfer, link)


def alone_s(one: CollectiveCost) -> float:
    return one.idle_s + one.latency_s + one.transfer_s


def test_one_collective_takes_its_latency_and_its_transfer() -> None:
    clock = Clock()
    clock.wait(clock.issue(cost(0.5, 2.0), Queue(1)))
    assert (clock.now_s, clock.exposed_s, clock.in_flight_s, clock.compute_s) == (2.5, 2.5, 2.5, 0.0)


def test_what_compute_hides_is_not_exposed() -> None:
    clock = Clock()
    flight = clock.issue(cost(0.5, 2.0), Queue(1))
    clock.compute(1.0)
    clock.wait(flight)
    assert (clock.now_s, clock.exposed_s, clock.compute_s) == (2.5, 1.5, 1.0)
    clock.wait(flight)
    assert clock.now_s == 2.5, "what is done is not waited for again"


@pytest.mark.parametrize("together", [1, 2, 3, 5])
def test_equal_transfers_that_share_a_link_take_as_many_times_as_long(together: int) -> None:
    clock = Clock()
    flights = [clock.issue(cost(0.25, 2.0), Queue(1)) for _ in range(together)]
    for flight in flights:
        clock.wait(flight)
    assert clock.now_s == pytest.approx(0.25 + 2.0 * together), "latency is not shared"


@pytest.mark.parametrize(
    ("share", "together", "slowdown"), [(0.5, 2, 1.0), (0.5, 3, 1.5), (0.25, 3, 1.0), (0.75, 2, 1.5)]
)
def test_transfers_that_keep_a_part_of_the_link_busy(share: float, together: int, slowdown: float) -> None:
    clock = Clock()
    for _ in range(together):
        clock.issue(CollectiveCost(0.25, 2.0, "link", share), Queue(1))
    clock.drain()
    assert clock.now_s == pytest.approx(0.25 + 2.0 * slowdown)


def test_links_are_independent() -> None:
    clock = Clock()
    for link in ("inside", "between"):
        clock.issue(cost(0.0, 2.0, link), Queue(1))
    clock.drain()
    assert clock.now_s == 2.0


def test_a_queue_lets_so_many_run_at_once() -> None:
    """Three of latency 1 and no transfer: one after the other, or two at once and then the third."""
    for width, end in ((1, 3.0), (2, 2.0), (3, 1.0)):
        clock, queue = Clock(), Queue(width)
        flights = [clock.issue(cost(1.0, 0.0), queue) for _ in range(3)]
        clock.wait(flights[-1])
        assert clock.now_s == end


@pytest.mark.parametrize(("idle", "latency"), [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0)])
def test_what_could_begin_earlier_has_done_so_and_compute_pays_in_arrears(idle: float, latency: float) -> None:
    """At 4 s, two of 3 s that could begin at 1 s: the first was done at 4, and its queue lets the second go only then.
    Beside the first, compute was 1.5 times as slow, so that of its 3 s there one is still to be done.
    """
    clock, queue = Clock(Contention(compute=1.5)), Queue(1)
    one = CollectiveCost(latency, 2.0, "link", idle_s=idle)
    clock.compute(4.0)
    first = clock.issue(one, queue, ready_s=1.0)
    assert (first.began_s, first.ended_s, clock.in_flight_s) == (1.0, 4.0, 3.0)
    assert clock.now_s == clock.compute_s == pytest.approx(5.0)
    second = clock.issue(one, queue, ready_s=1.0)
    assert second.began_s == 4.0 and clock.now_s > 5.0
    clock.wait(second)
    assert clock.now_s == pytest.approx(7.0) and clock.in_flight_s == pytest.approx(6.0)
    late = clock.issue(cost(1.0, 0.0), Queue(1), ready_s=99.0)
    assert late.began_s == clock.now_s, "no later than it is issued"


@pytest.mark.parametrize("communication", [1.0, 2.0])
@pytest.mark.parametrize("ready", [3.9, 3.25, 2.5, 1.5])
def test_what_began_earlier_goes_on_from_where_it_is(ready: float, communication: float) -> None:
    """By 4 s it is idling, at its latency, or at its transfer, as far as compute let it; then it has all to itself."""
    clock = Clock(Contention(communication=communication))
    clock.compute(4.0)
    clock.wait(clock.issue(CollectiveCost(0.75, 2.0, "link", idle_s=0.25), Queue(1), ready_s=ready))
    assert clock.now_s == pytest.approx(4.0 + 3.0 - (4.0 - ready) / communication)


def test_what_does_not_contend_draws_nothing_out() -> None:
    clock = Clock(Contention(compute=2.0, communication=2.0))
    clock.issue(cost(0.0, 3.0), Queue(1), contends=False)
    clock.compute(4.0)
    assert clock.now_s == 4.0 and clock.in_flight_s == 3.0


@pytest.mark.parametrize(("idle", "latency"), [(0.0, 0.0), (0.0, 1.5), (0.0, 3.0), (1.0, 0.5), (3.0, 0.0)])
def test_contention_draws_out_both_while_both_go_on(idle: float, latency: float) -> None:
    """2 s of compute take 3 beside a collective, which gets through 2 s of its 3 in that time; then it is alone."""
    clock = Clock(Contention(compute=1.5, communication=1.5))
    flight = clock.issue(CollectiveCost(latency, 3.0 - idle - latency, "link", idle_s=idle), Queue(1))
    clock.compute(2.0)
    assert clock.now_s == pytest.approx(3.0)
    clock.wait(flight)
    assert clock.now_s == pytest.approx(4.0)
    clock.compute(1.0)
    assert clock.now_s == pytest.approx(5.0), "nothing else goes on"


def test_a_transfer_that_ends_within_compute_slows_only_a_part_of_it() -> None:
    clock = Clock(Contention(compute=2.0))
    clock.issue(cost(0.0, 1.0), Queue(1))
    clock.compute(3.0)
    assert clock.now_s == pytest.approx(1.0 + 2.5)


class BySize:
    """Twice for payloads of 1, one and a half for larger ones; handing over takes 0.25 s."""

    def beside(self, payload_bytes: float) -> Contention:
        factor = 2.0 if payload_bytes == 1 else 1.5
        return Contention(factor, factor, hand_over_s=0.25)


def test_small_messages_take_more_than_large_ones_do() -> None:
    """While both are under way the small one's factor holds for compute, and each transfer has its own."""
    clock = Clock(BySize())
    small = clock.issue(cost(0.0, 1.0, "inside"), Queue(1), payload_bytes=1)
    large = clock.issue(cost(0.0, 3.0, "between"), Queue(1), payload_bytes=100)
    assert clock.compute_s == 0.5, "handing over takes what was measured, collectives in flight or not"
    clock.compute(0.5)  # beside both until the small one is over at 1.5 (half its pace)
    assert clock.now_s == pytest.approx(1.5) and small.ended_s == pytest.approx(1.5)
    clock.compute(1.0)
    assert clock.now_s == pytest.approx(3.0)
    clock.wait(large)  # by then it had 0.25 and (1.0 + 1.5) / 1.5 of its 3 s
    assert clock.now_s == pytest.approx(3.0 + 3.0 - 0.25 - 2.5 / 1.5)


@pytest.mark.parametrize(("together", "expected"), [(0.0, 5.0), (0.6, 5.0), (0.75, 6.0), (1.0, 8.0), (1.25, 10.0)])
def test_latencies_that_are_work_pass_side_by_side_no_faster_than_measured(together: float, expected: float) -> None:
    """Two of 4 s in flight, 1 s of each on the link, take at least 8 s times `together`; one by itself takes 4 s."""
    clock, queue = Clock(Contention(together=together)), Queue(2)
    flights = [clock.issue(cost(3.0, 1.0), queue) for _ in range(2)]
    clock.drain()
    assert clock.now_s == pytest.approx(expected)
    assert [flight.ended_s for flight in flights] == pytest.approx([expected] * 2)
    clock.wait(clock.issue(cost(3.0, 1.0), queue))
    assert clock.now_s == pytest.approx(expected + 4.0)
    clock.issue(cost(3.0, 1.0, "inside"), Queue(2))
    clock.issue(cost(3.0, 1.0, "between"), Queue(2))
    clock.drain()
    assert clock.now_s == pytest.approx(expected + 8.0), "those of other groups have threads of their own"


def test_those_that_idle_hold_each_other_up_no_more_than_their_latencies_and_transfers_do() -> None:
    """Two of 4 s in flight, which idle for 2 of them at once: of the other 2, no latency passes side by side."""
    clock, queue = Clock(Contention(together=1.0)), Queue(2)
    flights = [clock.issue(CollectiveCost(1.0, 1.0, "link", idle_s=2.0), queue) for _ in range(2)]
    clock.drain()
    assert clock.now_s == pytest.approx(2.0 + 2 * 2.0)
    assert [flight.ended_s for flight in flights] == pytest.approx([6.0] * 2)
    working, idling = clock.issue(cost(2.0, 0.0), queue), clock.issue(CollectiveCost(2.0, 0.0, "link", 1.0, 3.0), queue)
    clock.drain()
    assert (working.ended_s, idling.ended_s) == (6.0 + 2.0, 6.0 + 5.0), "one at work at a time"


def test_a_collective_begins_when_the_last_rank_is_there() -> None:
    """With the square root of the compute since all were level: after a wait that held this rank up."""
    clock = Clock(Contention(drift=0.5))
    clock.compute(4.0)
    clock.wait(clock.issue(cost(0.25, 1.0), Queue(1)))
    assert clock.now_s == pytest.approx(4.0 + 0.5 * 2.0 + 1.25)
    clock.wait(clock.issue(cost(0.25, 1.0), Queue(1)))
    assert clock.now_s == pytest.approx(6.25 + 1.25), "nobody has computed in between"
    clock.compute(9.0)
    clock.wait(clock.issue(cost(0.0, 1.0), Queue(1)))
    assert clock.now_s == pytest.approx(7.5 + 9.0 + 1.5 + 1.0)


def test_the_last_rank_is_late_by_no_more_than_a_share_of_what_was_computed() -> None:
    clock = Clock(Contention(drift=0.5, most_late=0.25))
    clock.compute(1.0)
    clock.wait(clock.issue(cost(0.0, 1.0), Queue(1)))
    assert clock.now_s == pytest.approx(1.0 + 0.25 + 1.0), "not 0.5, the square root"
    clock.compute(16.0)
    clock.wait(clock.issue(cost(0.0, 1.0), Queue(1)))
    assert clock.now_s == pytest.approx(2.25 + 16.0 + 2.0 + 1.0), "not a quarter"


def test_a_collective_goes_on_while_it_is_handed_over() -> None:
    """Whatever takes the rank's core then works on it: one that is waited for takes what it takes alone."""
    clock, queue = Clock(Contention(2.0, 4.0, hand_over_s=0.5)), Queue(1)
    clock.wait(clock.issue(cost(0.25, 1.0), queue))
    assert clock.now_s == pytest.approx(1.25) and clock.compute_s == pytest.approx(0.5)
    clock.wait(clock.issue(cost(0.0, 0.25), queue))
    assert clock.now_s == pytest.approx(1.75), "but it takes no less than that"


def test_ranks_do_not_drift_apart_while_they_hand_over() -> None:
    clock, queue = Clock(Contention(drift=0.5, hand_over_s=0.25)), Queue(1)
    for _ in range(3):
        clock.wait(clock.issue(cost(0.0, 0.125), queue))
    assert clock.now_s == pytest.approx(3 * 0.25)
    clock.compute(1.0)
    clock.wait(clock.issue(cost(0.0, 1.0), queue))
    assert clock.now_s == pytest.approx(0.75 + 1.0 + 0.5 + 1.0), "as after a second of compute"


def test_a_collective_that_waits_for_the_last_rank_takes_nothing_from_compute() -> None:
    clock = Clock(Contention(compute=2.0, drift=0.5))
    clock.compute(4.0)
    clock.issue(cost(0.0, 1.0), Queue(1))
    clock.compute(1.0)
    assert clock.now_s == pytest.approx(5.0), "the last rank is there only now"
    clock.compute(1.0)
    assert clock.now_s == pytest.approx(5.0 + 1.0 + 0.5)


def test_lateness_does_not_add_up_over_collectives_that_follow_one_another() -> None:
    """The last rank issues both a second later than this one; the link is free in between no longer than that."""
    clock, queue = Clock(Contention(drift=0.5)), Queue(1)
    clock.compute(4.0)
    first, second = (clock.issue(cost(0.0, 3.0), queue) for _ in range(2))
    clock.compute(1.0)
    clock.wait(first)
    assert clock.now_s == pytest.approx(4.0 + 1.0 + 3.0)
    clock.wait(second)
    assert clock.now_s == pytest.approx(8.0 + 3.0)


def test_a_wait_for_what_is_done_does_not_level_ranks() -> None:
    clock = Clock(Contention(drift=0.5))
    clock.compute(4.0)
    flight = clock.issue(cost(0.0, 1.0), Queue(1))
    clock.compute(5.0)
    clock.wait(flight)
    clock.wait(clock.issue(cost(0.0, 1.0), Queue(1)))
    assert clock.now_s == pytest.approx(9.0 + 0.5 * 3.0 + 1.0)


def play(issued: list[tuple[float, CollectiveCost, int]], contention: Contention) -> tuple[Clock, list]:
    """Compute before each collective, which is issued in the queue of that number; wait for all."""
    clock, queues = Clock(contention), [Queue(1), Queue(2)]
    flights = []
    for compute, one, number in issued:
        clock.compute(compute)
        flights.append(clock.issue(one, queues[number]))
    for flight in flights:
        clock.wait(flight)
    return clock, flights


programs = st.lists(st.tuples(seconds, costs, st.integers(0, 1)), max_size=8)


@given(programs, factors, factors)
def test_no_transfer_is_faster_than_alone_and_no_link_is_overbooked(issued: list, compute: float, other: float) -> None:
    _, flights = play(issued, Contention(compute, other))
    for flight in flights:
        assert flight.ended_s - flight.began_s >= alone_s(flight.cost) - CLOSE
        assert flight.began_s >= flight.issued_s
    for link in ("inside", "between"):
        carried = sum(one.transfer_s for _, one, _ in issued if one.link == link)
        own = [flight for flight in flights if flight.cost.link == link]
        if own:
            assert max(f.ended_s for f in own) - min(f.began_s for f in own) >= carried - CLOSE


@given(programs)
def test_the_total_lies_between_its_bounds(issued: list) -> None:
    clock, _ = play(issued, Contention())
    computed = sum(compute for compute, _, _ in issued)
    alone = sum(alone_s(one) for _, one, _ in issued)
    longest = max((alone_s(one) for _, one, _ in issued), default=0.0)
    assert max(computed, longest) - CLOSE <= clock.now_s <= computed + alone + CLOSE
    assert clock.compute_s == pytest.approx(computed)
    assert clock.now_s == pytest.approx(clock.compute_s + clock.exposed_s), "a rank computes or waits"
    assert clock.in_flight_s <= alone + CLOSE


@given(st.lists(st.tuples(seconds, costs), max_size=6))
def test_blocking_collectives_add_up(issued: list) -> None:
    clock, queue = Clock(), Queue(1)
    for compute, one in issued:
        clock.compute(compute)
        clock.wait(clock.issue(one, queue))
    assert clock.now_s == pytest.approx(sum(c + alone_s(one) for c, one in issued))


@given(programs)
def test_a_queue_of_one_keeps_its_order(issued: list) -> None:
    _, flights = play(issued, Contention())
    own = [flight for flight, (_, _, number) in zip(flights, issued, strict=True) if number == 0]
    assert all(one.ended_s <= other.began_s for one, other in pairwise(own))
