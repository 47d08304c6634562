"""When links deliver: the times of all collectives of a run's ranks, in memory that the ranks share.

The ranks of a run with `--link` are on one machine, so they have one clock and can share a file. Each notes when it
issues a collective. When Gloo has moved the data, which is at once, the first rank that asks puts the collective's
messages on the links: a link carries one message at a time, in each direction. That gives each rank the moment when a
real link would have delivered.

The file has no name once all ranks have opened it, so nothing is left behind.

What each rank sends is by Gloo's algorithms (gloo/{allreduce,allgather,broadcast,scatter,gather,barrier,alltoall}.cc;
torch's ProcessGroupGloo.cpp makes a reduce-scatter from an all-reduce). In a ring every rank sends to its neighbour all
the time, and all ranks end together. In a tree data goes along edges.
"""

import fcntl
import mmap
import os
import tempfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, inf, log2
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddp_lab.collectives.kinds import sent_share
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.speed import Nodes, SimulatedLink


@dataclass(frozen=True)
class RingSchedule:
    """What each rank sends, and receives; and how many messages wait for one another."""

    nbytes: float
    hops: int


@dataclass(frozen=True)
class Edge:
    """One message between ranks of the group. `is_forwarded`: the sender must have received it."""

    sender: int
    receiver: int
    nbytes: float
    is_forwarded: bool = False


Schedule = RingSchedule | tuple[Edge, ...]


def all_reduce(size: int, nbytes: float) -> RingSchedule:
    """`nbytes`: of the tensor."""
    return RingSchedule(sent_share("all_reduce", size) * nbytes, 2 * (size - 1))


def all_gather(size: int, nbytes: float) -> RingSchedule:
    """`nbytes`: of what one rank gives.

    Each part goes in two halves. Two ranks have one connection, on which the first halves take turns.
    """
    return RingSchedule(1.5 * nbytes if size == 2 else (size - 1) * nbytes, size - 1)


def barrier(size: int, nbytes: float = 0) -> RingSchedule:
    """Rounds of a dissemination barrier, which sends nothing."""
    return RingSchedule(nbytes, ceil(log2(size)))


def broadcast(size: int, nbytes: float, root: int) -> tuple[Edge, ...]:
    """A binomial tree: in round k, the first 2^k ranks, counted from the root, each send to the one 2^k further."""
    edges = []
    for distance in (1 << k for k in range(ceil(log2(size)))):
        for sender in range(min(distance, size - distance)):
            ends = ((sender + root) % size, (sender + distance + root) % size)
            edges.append(Edge(*ends, nbytes, is_forwarded=sender > 0))
    return tuple(edges)


def scatter(size: int, nbytes: float, root: int) -> tuple[Edge, ...]:
    """`nbytes`: of what one rank receives."""
    return tuple(Edge(root, receiver, nbytes) for receiver in range(size) if receiver != root)


def gather(size: int, nbytes: float, root: int) -> tuple[Edge, ...]:
    """`nbytes`: of what one rank gives."""
    return tuple(Edge(sender, root, nbytes) for sender in range(size) if sender != root)


def all_to_all(size: int, nbytes: float) -> tuple[Edge, ...]:
    """`nbytes`: of what one rank gives."""
    return tuple(
        Edge(sender, receiver, nbytes / size)
        for sender in range(size)
        for receiver in range(size)
        if sender != receiver
    )


# When links deliver it ------------------------------------------------------------------------------------------------


GROUPS = 256
"""Most process groups of a run."""
SPANS = 32
"""Times of work that a link remembers apart; older ones are taken for one."""
TOUCHING_S = 1e-9
SLOTS = 1024
"""Collectives of a group that are remembered. A rank issues no more before the first of them is delivered."""


def layout(ranks: int) -> np.dtype:
    """What is in the file, for so many ranks, as 64-bit floats.

    - `links`: begin and end of the times in which each works. By direction (sending, receiving), by whether it leads to
      other nodes, and by rank. Times that are not used are 0.
    - `names`: of groups, as numbers; 0 where there is none.
    - `connections`: of each group, sender and receiver: when it is free again.
    - `slots`: of each group, its latest collectives. `numbers`: of the latest that each rank has issued, and at which
      of `times`; `scheduled`: of the collective to which the ends belong; `ends`: when the message of a sender to a
      receiver has left, 0 if it is not on its links yet. A ring has one end, in the first cell.
    """
    by_rank, by_pair = ("f8", ranks), ("f8", (ranks, ranks))
    slot = [("numbers", *by_rank), ("times", *by_rank), ("scheduled", "f8"), ("ends", *by_pair)]
    links, connections = ("links", "f8", (2, 2, ranks, SPANS, 2)), ("connections", "f8", (GROUPS, ranks, ranks))
    return np.dtype([links, ("names", "f8", GROUPS), connections, ("slots", slot, (GROUPS, SLOTS))])


class Ledger:
    """The ledger in a file of `make_file`: each rank has a link, and with `nodes` a second one."""

    def __init__(self, path: Path, world_size: int, link: SimulatedLink, nodes: Nodes | None = None) -> None:
        self._link, self._nodes = link, nodes
        self._file = path.open("r+b")
        self._cells: Any = np.ndarray((), layout(world_size), mmap.mmap(self._file.fileno(), 0))
        self._threads = threading.Lock()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def group(self, name: str) -> int:
        """The number of a process group."""
        code, names = zlib.crc32(name.encode()) + 1.0, self._cells["names"]
        with self._locked():
            for number in range(GROUPS):
                if names[number] in (0, code):
                    names[number] = code
                    return number
        raise RuntimeError(f"--link: a run can have {GROUPS} process groups, and this is one more")

    def _slot(self, group: int, number: int) -> Any:
        return self._cells["slots"][group, number % SLOTS]

    def issue(self, group: int, number: int, rank: int) -> None:
        """Note that `rank`, as the group counts, issues the group's collective `number` now; numbers begin at 1."""
        slot = self._slot(group, number)
        slot["times"][rank] = monotonic()
        slot["numbers"][rank] = number  # no lock: it is this rank's, and others look when Gloo has moved data since

    def delivery(self, group: int, number: int, rank: int, members: tuple[int, ...], schedule: Schedule) -> float:
        """When the links have delivered all that `rank` sends and receives, as `time.monotonic`. `members`: the group's
        ranks, by their numbers in the whole world."""
        slot = self._slot(group, number)
        ends, times, numbers = slot["ends"], slot["times"][: len(members)], slot["numbers"][: len(members)]
        with self._locked():
            if numbers.max() > number:
                return 0.0  # it has been delivered to another rank, which is `SLOTS` collectives ahead
            issued = np.where(numbers == number, times, 0.0).tolist()
            if slot["scheduled"] != number:
                slot["scheduled"], ends[:] = number, 0.0
            if isinstance(schedule, RingSchedule):
                if not ends[0, 0]:
                    ends[0, 0] = self._pass_ring(schedule, members, max(issued))
                return float(ends[0, 0])
            call = _Call(schedule, members, issued, ends, self._cells["connections"][group])
            own_edges = [edge for edge in schedule if rank in (edge.sender, edge.receiver)]
            return max((self._end_for(rank, edge, call) for edge in own_edges), default=0.0)

    def _pass_ring(self, ring: RingSchedule, members: tuple[int, ...], ready: float) -> float:
        """When it ends: when its slowest link is through."""
        pairs = list(zip(members, members[1:] + members[:1], strict=True))
        ends = [self._occupy(*pair, ring.nbytes, ready) for pair in pairs]
        return max(ends) + ring.hops * max(self._between(*pair).latency_s for pair in pairs)

    def _end_for(self, rank: int, edge: Edge, call: "_Call") -> float:
        """When `rank`, one of its two, is done with a message."""
        link = self._between(call.members[edge.sender], call.members[edge.receiver])
        return self._end(edge, call) + (link.latency_s if rank == edge.receiver else 0)

    def _end(self, edge: Edge, call: "_Call") -> float:
        """When its last byte leaves. The message goes on its links when a rank first asks for that.

        A rank asks only when Gloo has moved the data, so both ends of the message have issued the collective then. Two
        ranks of a group have one connection. Gloo sends what the receiver has asked for, over that same connection. So
        a request waits for data that goes its way, and messages of both directions take turns.
        """
        sender, receiver = ends = edge.sender, edge.receiver
        if not call.ends[ends]:
            connection = min(ends), max(ends)
            ready = max(call.issued[sender], call.issued[receiver], float(call.connections[connection]))
            if edge.is_forwarded:
                before = next(earlier for earlier in call.schedule if earlier.receiver == sender)
                ready = max(ready, self._end_for(sender, before, call))
            pair = call.members[sender], call.members[receiver]
            call.ends[ends] = call.connections[connection] = self._occupy(*pair, edge.nbytes, ready)
        return float(call.ends[ends])

    def _occupy(self, sender: int, receiver: int, nbytes: float, ready: float) -> float:
        """Send a message in the time that its two links have left; when its last byte has left."""
        link, links = self._between(sender, receiver), self._cells["links"]
        leaves_node, seconds = int(link is not self._link), 8 * nbytes / link.bits_per_s
        ends = (links[0, leaves_node, sender], links[1, leaves_node, receiver])
        return max(carry(spans, ready, seconds) for spans in ends)

    def _between(self, sender: int, receiver: int) -> SimulatedLink:
        """The link that leads from one rank of the world to the other."""
        nodes = self._nodes
        return nodes.link if nodes is not None and nodes.are_between(sender, receiver) else self._link


def carry(link: NDArray[np.float64], ready: float, seconds: float) -> float:
    """Let a link work so long, in the time from `ready` on in which it is idle; when it is done. `link`: begin and end
    of the times in which it works, which this adds to.

    Messages are put on links when somebody asks, which is not the order in which they are ready. So a message may also
    use the time before one that was put there earlier.
    """
    spans = [(begin, stop) for begin, stop in link.tolist() if stop]
    pieces, end, remaining_s = [], ready, seconds
    for begin, stop in [*spans, (inf, inf)]:
        if begin > end and remaining_s > 0:
            piece = min(remaining_s, begin - end)
            pieces.append((end, end + piece))
            end, remaining_s = end + piece, remaining_s - piece
        if remaining_s > 0:
            end = max(end, stop)
    merged = joined(sorted(spans + pieces))
    link[:] = 0.0
    link[: len(merged)] = merged or 0.0
    return end


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `SPANS` of them: those that touch are one, and so are the oldest if there are more."""
    merged: list[tuple[float, float]] = []
    for begin, end in spans:
        if merged and begin - merged[-1][1] < TOUCHING_S:
            begin, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((begin, end))
    surplus = len(merged) - SPANS
    return merged if surplus <= 0 else [(merged[0][0], merged[surplus][1]), *merged[surplus + 1 :]]


class _Call(NamedTuple):
    """A collective whose messages go along edges. `issued`: when, by rank of the group, 0 if it is not known; `ends`,
    `connections`: of this collective, and of its group, by sender and receiver (`layout`)."""

    schedule: tuple[Edge, ...]
    members: tuple[int, ...]
    issued: list[float]
    ends: NDArray[np.float64]
    connections: NDArray[np.float64]


def make_file(world_size: int) -> Path:
    """An empty ledger for so many ranks. Whoever has all ranks open it removes it."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    try:
        descriptor, name = tempfile.mkstemp(prefix="link-", dir=folder)
        os.truncate(descriptor, layout(world_size).itemsize)
        os.close(descriptor)
    except OSError as error:
        raise UserError(f"--link: no shared file in {folder or tempfile.gettempdir()}: {error.strerror}") from error
    return Path(name)
