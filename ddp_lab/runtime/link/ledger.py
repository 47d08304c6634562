"""When links deliver: the times of all collectives of a run's ranks, in memory that the ranks share.

The ranks of a run with `--link` are on one machine, so they have one clock and can share a file. Each notes when it
issues a collective. When Gloo has moved the data, which is at once, the first rank that asks puts the collective's
messages on the links: a link carries one message at a time, in each direction. That gives each rank the moment when a
real link would have delivered.

The file has no name once all ranks have opened it, so nothing is left behind.
"""

import fcntl
import mmap
import os
import tempfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.schedule import Edge, Ring, Schedule
from ddp_lab.runtime.link.speed import Link, Nodes

GROUPS = 256
"""Most process groups of a run."""
SPANS = 32
"""Times of work that a link remembers apart; older ones are taken for one."""
TOUCHING_S = 1e-9
SLOTS = 1024
"""Collectives of a group that are remembered. A rank issues no more before the first of them is delivered."""


class _Layout:
    """Where things are in the file, which is a row of 64-bit floats, for n ranks.

    A slot has three rows of n: the number of the latest collective that each rank has issued, when it did, and (in one
    cell) the number of the collective to which the ends belong. n x n ends follow: when the message of a sender to a
    receiver has left, 0 if it is not on its links yet. A ring has one end, in the first cell.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.link_size = 1 + 2 * SPANS  # how many times of work follow, then the begin and end of each, in order
        self.sending, self.receiving = 0, 2 * ranks * self.link_size  # of each rank's link, then of those between nodes
        self.names = 4 * ranks * self.link_size
        self.connections = self.names + GROUPS  # of each group, sender and receiver: when it is free again
        self.slots = self.connections + GROUPS * ranks * ranks
        self.slot_size = (3 + ranks) * ranks
        self.size = self.slots + GROUPS * SLOTS * self.slot_size

    def slot(self, group: int, number: int) -> int:
        return self.slots + (group * SLOTS + number % SLOTS) * self.slot_size


class Ledger:
    """
    Args:
        path: A file that `make_file` has made.
        world_size: Ranks, each with a link of its own.
        nodes: With a second link each.
    """

    def __init__(self, path: Path, world_size: int, link: Link, nodes: Nodes | None = None) -> None:
        self._link, self._nodes, self._layout = link, nodes, _Layout(world_size)
        self._file = path.open("r+b")
        self._cells = memoryview(mmap.mmap(self._file.fileno(), 0)).cast("d")
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
        """The number of a process group.

        Raises:
            RuntimeError: there are too many.
        """
        code = zlib.crc32(name.encode()) + 1.0
        with self._locked():
            for number in range(GROUPS):
                if self._cells[self._layout.names + number] in (0, code):
                    self._cells[self._layout.names + number] = code
                    return number
        raise RuntimeError(f"--link: a run can have {GROUPS} process groups, and this is one more")

    def issue(self, group: int, number: int, rank: int) -> None:
        """Note that `rank`, as the group counts, issues the group's collective `number` now; numbers begin at 1."""
        slot = self._layout.slot(group, number) + rank
        self._cells[slot + self._layout.ranks] = monotonic()
        self._cells[slot] = number  # no lock: it is this rank's cell, and others look when Gloo has moved data since

    def delivery(self, group: int, number: int, rank: int, members: tuple[int, ...], schedule: Schedule) -> float:
        """When the links have delivered all that `rank` sends and receives, as `time.monotonic`.

        Args:
            members: The group's ranks, by their numbers in the whole world.
        """
        cells, ranks = self._cells, self._layout.ranks
        slot = self._layout.slot(group, number)
        times, scheduled, ends = slot + ranks, slot + 2 * ranks, slot + 3 * ranks
        with self._locked():
            numbers = cells[slot : slot + len(members)]
            if max(numbers) > number:
                return 0.0  # it has been delivered to another rank, which is `SLOTS` collectives ahead
            issued = [cells[times + each] if found == number else 0.0 for each, found in enumerate(numbers)]
            if cells[scheduled] != number:
                cells[scheduled] = number
                for cell in range(ends, ends + ranks * ranks):
                    cells[cell] = 0.0
            if isinstance(schedule, Ring):
                if not cells[ends]:
                    cells[ends] = self._pass_ring(schedule, members, max(issued))
                return cells[ends]
            connections = self._layout.connections + group * ranks * ranks
            call = _Call(schedule, members, issued, ends, connections)
            own = [edge for edge in schedule if rank in (edge.sender, edge.receiver)]
            return max((self._end_for(rank, edge, call) for edge in own), default=0.0)

    def _pass_ring(self, ring: Ring, members: tuple[int, ...], ready: float) -> float:
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
        a request waits behind data that goes its way, and messages of both directions take turns.
        """
        cells, size, (sender, receiver) = self._cells, len(call.members), (edge.sender, edge.receiver)
        end = call.ends + sender * size + receiver
        if not cells[end]:
            connection = call.connections + min(sender, receiver) * size + max(sender, receiver)
            ready = max(call.issued[sender], call.issued[receiver], cells[connection])
            if edge.is_forwarded:
                before = next(each for each in call.schedule if each.receiver == sender)
                ready = max(ready, self._end_for(sender, before, call))
            pair = call.members[sender], call.members[receiver]
            cells[end] = cells[connection] = self._occupy(*pair, edge.nbytes, ready)
        return cells[end]

    def _occupy(self, sender: int, receiver: int, nbytes: float, ready: float) -> float:
        """Send a message in the time that its two links have left; when its last byte has left."""
        link, layout = self._between(sender, receiver), self._layout
        first, seconds = 0 if link is self._link else layout.ranks, 8 * nbytes / link.bits_per_s
        ends = [
            self._carry(direction + (first + rank) * layout.link_size, ready, seconds)
            for direction, rank in ((layout.sending, sender), (layout.receiving, receiver))
        ]
        return max(ends)

    def _between(self, sender: int, receiver: int) -> Link:
        """The link that leads from one rank of the world to the other."""
        nodes = self._nodes
        return nodes.link if nodes is not None and nodes.are_between(sender, receiver) else self._link

    def _carry(self, link: int, ready: float, seconds: float) -> float:
        """Let the link in cell `link` work so long, in the time from `ready` on in which it is idle; when it is done.

        Messages are put on links when somebody asks, which is not the order in which they are ready. So a message may
        also use the time before one that was put there earlier.
        """
        cells, first = self._cells, link + 1
        end_of_spans = first + 2 * int(cells[link])
        spans = list(zip(cells[first:end_of_spans:2], cells[first + 1 : end_of_spans : 2], strict=True))
        pieces, end, left = [], ready, seconds
        for begin, stop in spans:
            if begin > end and left > 0:
                piece = min(left, begin - end)
                pieces.append((end, end + piece))
                end, left = end + piece, left - piece
            if left > 0:
                end = max(end, stop)
        if left > 0:
            pieces.append((end, end + left))
            end += left
        merged = joined(sorted(spans + pieces))
        cells[link] = len(merged)
        for cell, value in enumerate(chain.from_iterable(merged), start=first):
            cells[cell] = value
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
    """A collective whose messages go along edges.

    Attributes:
        issued: When, by rank of the group; 0 if it is not known.
        ends, connections: Where in the file the n x n cells of this collective, and of its group, begin.
    """

    schedule: tuple[Edge, ...]
    members: tuple[int, ...]
    issued: list[float]
    ends: int
    connections: int


def make_file(world_size: int) -> Path:
    """An empty ledger for so many ranks. Whoever has all ranks open it removes it.

    Raises:
        UserError: it cannot be made.
    """
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    try:
        descriptor, name = tempfile.mkstemp(prefix="link-", dir=folder)
        os.truncate(descriptor, 8 * _Layout(world_size).size)
        os.close(descriptor)
    except OSError as error:
        raise UserError(f"--link: no shared file in {folder or tempfile.gettempdir()}: {error.strerror}") from error
    return Path(name)
