"""When links deliver, against schedules worked out by hand. A second carries 1000 bytes; latencies are given."""

import itertools
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.runtime.link import ledger
from ddp_lab.runtime.link.ledger import Ledger
from ddp_lab.runtime.link.speed import Nodes, SimulatedLink
from tests.tables import each_row

BITS = 8000


class Links:
    """A ledger whose clock the test sets."""

    def __init__(self, size, latency_s=0.0, nodes=None):
        path = ledger.make_file(size)
        self.ledger, self.size = Ledger(path, size, SimulatedLink(BITS, latency_s), nodes), size
        path.unlink()
        self._numbers = itertools.count(1)
        self.group = self.ledger.group("default")

    def issue(self, number, at):
        for rank, moment in enumerate(at):
            with mock.patch.object(ledger, "monotonic", lambda moment=moment: moment):
                self.ledger.issue(self.group, number, rank)

    def ends(self, number, messages, order=None):
        """By rank; `order`: in which order the ranks ask."""
        order, members = order or range(self.size), tuple(range(self.size))
        by_rank = {rank: self.ledger.delivery(self.group, number, rank, members, messages) for rank in order}
        return [by_rank[rank] for rank in range(self.size)]


def test_a_ring_begins_when_the_last_rank_has_issued_it():
    links = Links(2)
    links.issue(1, at=[5.0, 7.0])
    assert links.ends(1, ledger.all_reduce(2, 3000)) == [10.0, 10.0]


TWO_NODES = Nodes(2, SimulatedLink(BITS // 10, 0.5))


def test_what_goes_between_nodes_takes_the_other_link():
    links = Links(4, nodes=TWO_NODES)
    links.issue(1, at=[1.0] * 4)
    messages = (ledger.Edge(0, 1, 1000), ledger.Edge(0, 2, 1000), ledger.Edge(3, 2, 2000))
    assert links.ends(1, messages) == [11.0, 2.0, 11.5, 3.0]


def test_collectives_queue_on_a_link():
    links, messages = Links(2), ledger.all_reduce(2, 1000)
    for number in (1, 2, 3):
        links.issue(number, at=[1.0, 1.0])
    assert [links.ends(number, messages)[0] for number in (1, 2, 3)] == [2.0, 3.0, 4.0]
    links.issue(4, at=[9.0, 9.0])
    assert links.ends(4, messages) == [10.0, 10.0]


def test_a_broadcast_is_passed_on():
    """Rank 0 sends to 1 and 2, one after the other; rank 1 passes it on to 3."""
    links = Links(4, latency_s=0.25)
    links.issue(1, at=[1.0, 1.0, 1.0, 1.0])
    assert links.ends(1, ledger.broadcast(4, 1000, root=0)) == [3.0, 3.25, 3.25, 3.5]


@each_row("other_group, second", [("another", 2.0), ("default", 3.0)])
def test_directions_take_turns_on_a_connection_and_not_on_a_link(other_group, second):
    links = Links(2)
    links.issue(1, at=[1.0, 1.0])
    assert links.ends(1, ledger.broadcast(2, 1000, root=0)) == [2.0, 2.0]
    links.group = links.ledger.group(other_group)
    links.issue(2, at=[1.0, 1.0])
    assert links.ends(2, ledger.broadcast(2, 1000, root=1)) == [second, second]


def test_groups_share_the_links_of_their_ranks():
    links, messages = Links(2), ledger.all_reduce(2, 1000)
    links.issue(1, at=[1.0, 1.0])
    links.ends(1, messages)
    links.group = links.ledger.group("another")
    links.issue(1, at=[1.0, 1.0])
    assert links.ends(1, messages) == [3.0, 3.0]
    assert links.ledger.group("default") != links.group == links.ledger.group("another")


@given(st.integers(2, 5), st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.data())
def test_no_link_carries_more_than_its_rate(size, payloads, data):
    """Whatever is issued when, and by whichever rank asked for first."""
    links, sent = Links(size), [0.0] * size
    at, latest = 1.0, 0.0
    for number, nbytes in enumerate(payloads, start=1):
        at += data.draw(st.floats(0, 3))
        kind = data.draw(st.sampled_from(["all_reduce", "all_gather", "broadcast", "scatter", "gather", "all_to_all"]))
        rooted = kind in ("broadcast", "scatter", "gather")
        root = (data.draw(st.integers(0, size - 1)),) if rooted else ()
        messages = getattr(ledger, kind)(size, nbytes, *root)
        links.issue(number, at=[at + data.draw(st.floats(0, 1)) for _ in range(size)])
        order = data.draw(st.permutations(range(size)))
        latest = max(latest, *links.ends(number, messages, order))
        if isinstance(messages, ledger.RingSchedule):
            sent = [nbytes + messages.nbytes for nbytes in sent]
        else:
            for edge in messages:
                sent[edge.sender] += edge.nbytes
    assert latest >= 1.0 + 8 * max(sent) / BITS - 1e-9
