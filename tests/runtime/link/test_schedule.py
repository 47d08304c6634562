"""What ranks send, by two derivations: Gloo's algorithms written out here, and the planner's volumes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.planner.costs.volumes import volume
from ddp_lab.runtime.link import schedule
from ddp_lab.runtime.link.schedule import Edge, Ring
from tests.tables import each_row

sizes = st.integers(2, 9)


@given(sizes, st.integers(0, 8), st.integers(1, 10**6))
def test_a_broadcast_reaches_every_rank_once_from_one_that_has_it(size: int, root: int, nbytes: int) -> None:
    has = {root % size}
    for edge in schedule.broadcast(size, nbytes, root % size):
        assert edge.sender in has and edge.receiver not in has
        assert edge.is_forwarded == (edge.sender != root % size) and edge.nbytes == nbytes
        has.add(edge.receiver)
    assert has == set(range(size))


@given(sizes)
def test_a_rank_passes_a_broadcast_on_to_ranks_at_doubling_distances(size: int) -> None:
    """gloo/broadcast.cc: in round i, virtual ranks below 2^i send to the rank whose bit i is set."""
    expected = {
        (rank, rank | 1 << i) for i in range(4) for rank in range(size) if rank < 1 << i and (rank | 1 << i) < size
    }
    assert {(edge.sender, edge.receiver) for edge in schedule.broadcast(size, 1, 0)} == expected


@each_row("size", [2, 3, 4, 8])
def test_rings_carry_what_the_planner_expects(size: int) -> None:
    nbytes = 12_000
    reduce, gather = schedule.all_reduce(size, nbytes), schedule.all_gather(size, nbytes / size)
    assert reduce.nbytes == pytest.approx(volume("all_reduce", "gloo", size).busiest * nbytes)
    assert gather.nbytes == pytest.approx(volume("all_gather", "gloo", size).busiest * nbytes)
    assert (reduce.hops, gather.hops) == (2 * (size - 1), size - 1)
    assert schedule.barrier(size) == Ring(0, volume("barrier", "gloo", size).hops)


def test_stars_connect_the_root_with_everyone() -> None:
    assert schedule.scatter(3, 5, root=1) == (Edge(1, 0, 5), Edge(1, 2, 5))
    assert schedule.gather(3, 5, root=1) == (Edge(0, 1, 5), Edge(2, 1, 5))
    assert len(schedule.all_to_all(4, 5)) == 12
