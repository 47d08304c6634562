"""What ranks send, by two derivations: Gloo's algorithms written out here, and the planner's volumes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.planner.costs.links import volume
from ddp_lab.runtime.link import ledger
from ddp_lab.runtime.link.ledger import RingSchedule
from tests.tables import each_row

sizes = st.integers(2, 9)


@given(sizes, st.integers(0, 8), st.integers(1, 10**6))
def test_a_broadcast_reaches_every_rank_once_from_one_that_has_it(size, root, nbytes):
    has = {root % size}
    for edge in ledger.broadcast(size, nbytes, root % size):
        assert edge.sender in has and edge.receiver not in has
        assert edge.is_forwarded == (edge.sender != root % size) and edge.nbytes == nbytes
        has.add(edge.receiver)
    assert has == set(range(size))


@each_row("size", [2, 3, 4, 8])
def test_rings_carry_what_the_planner_expects(size):
    nbytes = 12_000
    reduce, gather = ledger.all_reduce(size, nbytes), ledger.all_gather(size, nbytes / size)
    assert reduce.nbytes == pytest.approx(volume("all_reduce", "gloo", size).busiest * nbytes)
    assert gather.nbytes == pytest.approx(volume("all_gather", "gloo", size).busiest * nbytes)
    assert (reduce.hops, gather.hops) == (2 * (size - 1), size - 1)
    assert ledger.barrier(size) == RingSchedule(0, volume("barrier", "gloo", size).hops)
