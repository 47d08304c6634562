"""When links deliver: the times of all collectives of a run's ranks, in memory that the ranks share.

The ranks of a run with `--link` are on one machine, so they have one clock and can share a file. Each notes when it
issues a collective. When Gloo has moved the data, which is at once, the first rank that asks puts the collective's
messages on the links: a link carries one message after the other, in each direction. That gives each rank the moment
when a real link would have delivered.

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
from pathlib import Path
from time import monotonic

import numpy as np

from training.link.schedule import Edge, Ring, Schedule
from training.link.speed import Link

GROUPS = 256
"""Most process groups of a run."""
SLOTS = 256
"""Collectives of a group that are remembered. A rank that is so far ahead of another has issued long ago."""
NUMBER, ISSUED, SCHEDULED = 0, 1, 2
"""Rows of a slot, with a column for each rank: number of the latest collective that it issued, and when. The first
column of the third has the number of the collective whose messages' ends follow in the other rows, by sender and
receiver; 0 for a message that is not on its links yet."""
HEAD = 3


class Ledger:
    """
    Args:
        path: A file that `make_file` has made.
        world_size: Ranks, each with a link of its own.
    """

    def __init__(self, path: Path, world_size: int, link: Link) -> None:
        self._link = link
        self._file = path.open("r+b")
        memory = np.frombuffer(mmap.mmap(self._file.fileno(), 0), dtype=np.float64)
        sizes = np.cumsum([2 * world_size, GROUPS, GROUPS * world_size**2])
        free, self._names, connections, slots = np.split(memory, sizes)
        self._sending, self._receiving = free.reshape(2, world_size)  # when each link is free again
        self._connections = connections.reshape(GROUPS, world_size, world_size)  # the same
        self._slots = slots.reshape(GROUPS, SLOTS, HEAD + world_size, world_size)
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
            for number, known in enumerate(self._names):
                if known in (0, code):
                    self._names[number] = code
                    return number
        raise RuntimeError(f"--link: a run can have {GROUPS} process groups, and this is one more")

    def issue(self, group: int, number: int, rank: int) -> None:
        """Note that `rank`, as the group counts, issues the group's collective `number` now; numbers begin at 1."""
        slot = self._slots[group, number % SLOTS]
        slot[ISSUED, rank] = monotonic()
        slot[NUMBER, rank] = number  # of its own, so no lock; others look once Gloo has moved data that was sent later

    def delivery(self, group: int, number: int, rank: int, members: tuple[int, ...], schedule: Schedule) -> float:
        """When the links have delivered all that `rank` sends and receives, as `time.monotonic`.

        Args:
            members: The group's ranks, by their numbers in the whole world.
        """
        with self._locked():
            slot = self._slots[group, number % SLOTS]
            if slot[NUMBER].max() > number:
                return 0.0  # another rank is `SLOTS` collectives ahead
            issued = np.where(slot[NUMBER] == number, slot[ISSUED], 0)
            ends = slot[HEAD:]
            if slot[SCHEDULED, 0] != number:
                slot[SCHEDULED, 0], ends[:] = number, 0
            if isinstance(schedule, Ring):
                if not ends[0, 0]:
                    ends[0, 0] = self._pass_ring(schedule, members, issued.max())
                return float(ends[0, 0])
            messages = _Messages(self, schedule, members, issued, ends, self._connections[group])
            return max(messages.end_for(edge, rank) for edge in schedule if rank in (edge.sender, edge.receiver))

    def _pass_ring(self, ring: Ring, members: tuple[int, ...], ready: float) -> float:
        """When it ends: when its slowest link is through."""
        neighbours = members[1:] + members[:1]
        ends = [self.occupy(*pair, ring.nbytes, ready) for pair in zip(members, neighbours, strict=True)]
        return max(ends) + ring.hops * self._link.latency_s

    def occupy(self, sender: int, receiver: int, nbytes: float, ready: float) -> float:
        """Send a message behind all that these links still carry; when its last byte has left."""
        seconds = 8 * nbytes / self._link.bits_per_s
        self._sending[sender] = max(ready, self._sending[sender]) + seconds
        self._receiving[receiver] = max(ready, self._receiving[receiver]) + seconds
        return max(self._sending[sender], self._receiving[receiver])

    @property
    def latency_s(self) -> float:
        return self._link.latency_s


class _Messages:
    """The messages of one collective. Each goes on its links when a rank first asks for its end.

    A rank asks only when Gloo has moved the data, so both ends of its messages have issued the collective then. Two
    ranks of a group have one connection. Gloo sends what the receiver has asked for, over that same connection. So a
    request waits behind data that goes its way, and messages of both directions take turns.
    """

    def __init__(
        self,
        ledger: Ledger,
        schedule: tuple[Edge, ...],
        members: tuple[int, ...],
        issued: np.ndarray,
        ends: np.ndarray,
        connections: np.ndarray,
    ) -> None:
        self._ledger, self._schedule, self._members = ledger, schedule, members
        self._issued, self._ends, self._connections = issued, ends, connections

    def end_for(self, edge: Edge, rank: int) -> float:
        return self._end(edge) + (self._ledger.latency_s if rank == edge.receiver else 0)

    def _end(self, edge: Edge) -> float:
        ends, (sender, receiver) = self._ends, (edge.sender, edge.receiver)
        if not ends[sender, receiver]:
            ready = max(self._issued[sender], self._issued[receiver])
            if edge.is_forwarded:
                before = next(each for each in self._schedule if each.receiver == sender)
                ready = max(ready, self.end_for(before, sender))
            pair = min(sender, receiver), max(sender, receiver)
            ready = max(ready, self._connections[pair])
            ends[sender, receiver] = self._connections[pair] = self._ledger.occupy(
                self._members[sender], self._members[receiver], edge.nbytes, ready
            )
        return float(ends[sender, receiver])


def make_file(world_size: int) -> Path:
    """An empty ledger for so many ranks. Whoever has all ranks open it removes it."""
    descriptor, name = tempfile.mkstemp(prefix="link-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    numbers = 2 * world_size + GROUPS * (1 + world_size**2 + SLOTS * (HEAD + world_size) * world_size)
    os.truncate(descriptor, 8 * numbers)
    os.close(descriptor)
    return Path(name)
