"""The simulated clock, against sums that can be done by hand and bounds that hold for any set of collectives."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.planner.contracts import CollectiveCost
from ddp_lab.planner.simulation.clock import Clock, Queue
from tests.tables import each_row

seconds = st.floats(0.0, 10.0).map(lambda value: round(value, 3))
links = st.sampled_from(["inside", "between"])
costs = st.builds(CollectiveCost, seconds, seconds, links)
CLOSE = 1e-9


def cost(latency, transfer, link="link"):
    return CollectiveCost(latency, transfer, link)


def wait_for_all(clock, flights):
    for flight in flights:
        clock.wait(flight)


@each_row(
    ("share", "together", "slowdown"), [(1.0, 1, 1.0), (1.0, 3, 3.0), (0.5, 2, 1.0), (0.5, 3, 1.5), (0.75, 2, 1.5)]
)
def test_transfers_share_a_link_and_latencies_do_not(share, together, slowdown):
    clock = Clock()
    wait_for_all(clock, [clock.issue(CollectiveCost(0.25, 2.0, "link", share), Queue(1)) for _ in range(together)])
    assert clock.now_s == pytest.approx(0.25 + 2.0 * slowdown)
    wait_for_all(clock, [clock.issue(cost(0.0, 2.0, link), Queue(1)) for link in ("inside", "between")])
    assert clock.now_s == pytest.approx(2.25 + 2.0 * slowdown), "links are independent"


def test_a_queue_lets_so_many_run_at_once():
    """Three of latency 1 and no transfer: one after the other, or two at once and then the third."""
    for width, end in ((1, 3.0), (2, 2.0), (3, 1.0)):
        clock, queue = Clock(), Queue(width)
        flights = [clock.issue(cost(1.0, 0.0), queue) for _ in range(3)]
        clock.wait(flights[-1])
        assert clock.now_s == end


@each_row("latency", [0.0, 1.0, 3.0])
def test_what_could_begin_earlier_has_done_so_and_compute_makes_up_for_it(latency):
    """At 4 s, two collectives of 3 s are issued that could begin at 1 s. The first was done at 4 s, and the second
    begins only then, as they share a queue. Beside the first, compute was 1.5 times as slow: 1 s is still to be done.
    """
    clock, queue = Clock(1.5), Queue(1)
    collective = cost(latency, 3.0 - latency)
    clock.compute(4.0)
    first = clock.issue(collective, queue, ready_s=1.0)
    assert (first.began_s, first.ended_s, clock.in_flight_s) == (1.0, 4.0, 3.0)
    assert clock.now_s == clock.compute_s == pytest.approx(5.0)
    second = clock.issue(collective, queue, ready_s=1.0)
    assert second.began_s == 4.0 and clock.now_s > 5.0
    clock.wait(second)
    assert clock.now_s == pytest.approx(7.0) and clock.in_flight_s == pytest.approx(6.0)
    late = clock.issue(cost(1.0, 0.0), Queue(1), ready_s=99.0)
    assert late.began_s == clock.now_s, "no later than it is issued"
    for ready in (3.5, 2.5, 1.5):  # by 4 s it is at its latency of 1 s, or at its transfer, and goes on from there
        clock = Clock()
        clock.compute(4.0)
        clock.wait(clock.issue(cost(1.0, 2.0), Queue(1), ready_s=ready))
        assert clock.now_s == pytest.approx(ready + 3.0)


def test_the_device_waits_for_a_host_that_is_behind():
    """Ten operators of 10 us, issued every 25 us. During a long one the host gets ahead, so later ones do not wait."""
    clock = Clock(host_s=25e-6)
    for _ in range(10):
        clock.compute(10e-6)
    assert clock.now_s == pytest.approx(260e-6) and clock.compute_s == pytest.approx(100e-6)
    assert clock.exposed_s == 0, "it waits for no collective"
    for seconds in (1e-3, *[10e-6] * 10):
        clock.compute(seconds)
    assert clock.now_s == pytest.approx(275e-6 + 1e-3 + 100e-6)
    clock.read_by_host()  # which was ahead
    clock.compute(10e-6)
    assert clock.now_s == pytest.approx(1375e-6 + 35e-6)


def play(issued, contention=1.0):
    """Compute before each collective, issue it in its queue, and wait for all."""
    clock, queues = Clock(contention), [Queue(1), Queue(2)]
    flights = []
    for compute, collective, number in issued:
        clock.compute(compute)
        flights.append(clock.issue(collective, queues[number]))
    wait_for_all(clock, flights)
    return clock, flights


programs = st.lists(st.tuples(seconds, costs, st.integers(0, 1)), max_size=8)


@given(programs, st.floats(1.0, 3.0))
def test_no_transfer_is_faster_than_alone_and_no_link_is_overbooked(issued, contention):
    _, flights = play(issued, contention)
    for flight in flights:
        assert flight.ended_s - flight.began_s >= flight.cost.latency_s + flight.cost.transfer_s - CLOSE
        assert flight.began_s >= flight.issued_s
    for link in ("inside", "between"):
        carried = sum(collective.transfer_s for _, collective, _ in issued if collective.link == link)
        on_link = [flight for flight in flights if flight.cost.link == link]
        if on_link:
            assert max(f.ended_s for f in on_link) - min(f.began_s for f in on_link) >= carried - CLOSE


@given(programs)
def test_the_total_lies_between_its_bounds(issued):
    clock, flights = play(issued)
    computed = sum(compute for compute, _, _ in issued)
    alone = [cost.latency_s + cost.transfer_s for _, cost, _ in issued]
    assert max([computed, *alone]) - CLOSE <= clock.now_s <= computed + sum(alone) + CLOSE
    assert clock.compute_s == pytest.approx(computed)
    assert clock.now_s == pytest.approx(clock.compute_s + clock.exposed_s), "a rank computes or waits"
    assert clock.in_flight_s <= sum(alone) + CLOSE
    queue = [flight for flight, (_, _, number) in zip(flights, issued, strict=True) if number == 0]
    assert all(first.ended_s <= second.began_s for first, second in pairwise(queue)), "a queue of one keeps its order"
