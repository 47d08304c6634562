"""A flight recorder: what a rank does, in memory that outlives its process.

Each rank keeps one file in memory. It holds the rank's step and phase, its latest collectives, why it ends, and what
Python wrote if it crashed. The other ranks of the node map this file when the run begins, so they can read it even
after the rank was killed by SIGKILL. Recording takes about a microsecond: it stores into mapped memory, and nothing
goes to a disk. The owner holds a lock on the file. The kernel releases the lock when the process ends, however it ends,
so the lock shows whether the owner is alive.
"""

import ctypes
import fcntl
import mmap
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from ddp_lab.collectives.calls import COMPLETED, ISSUED, STATES, Call
from ddp_lab.collectives.ranks import LONGEST_NAME
from ddp_lab.runtime.watch.exit_reason import ExitReason
from ddp_lab.runtime.watch.rank_state import RankState

RING_ENTRIES = 2048
TEXT_BYTES = 32768


class _Slot(ctypes.Structure):
    """A collective in the file."""

    _fields_ = (
        ("number", ctypes.c_int64),
        ("seq", ctypes.c_int64),
        ("elements", ctypes.c_int64),
        ("root", ctypes.c_int32),
        ("parameter", ctypes.c_int32),
        ("time_s", ctypes.c_double),
        ("state", ctypes.c_uint8),
        ("kind", ctypes.c_char * 24),
        ("dtype", ctypes.c_char * 16),
        ("group", ctypes.c_char * LONGEST_NAME),
    )


class _Page(ctypes.Structure):
    """The whole file; what Python writes of a crash follows it."""

    _fields_ = (
        ("rank", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("phase", ctypes.c_char * 32),
        ("progress_s", ctypes.c_double),
        ("count", ctypes.c_int64),
        ("waiting", ctypes.c_int64),
        ("stalled", ctypes.c_int64),
        ("is_finished", ctypes.c_bool),
        ("exit_reason", ctypes.c_char * TEXT_BYTES),
        ("ring", _Slot * RING_ENTRIES),
    )


CRASH_OFFSET = ctypes.sizeof(_Page)


class FlightRecorder:
    """The record of one rank. Its owner writes it; every process of the node can read it."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self._descriptor = descriptor
        self._page = _Page.from_buffer(mmap.mmap(descriptor, CRASH_OFFSET))

    @classmethod
    def create(cls, rank: int) -> "FlightRecorder":
        """A new record, owned by this process."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("ddp-lab-flight-recorder")
            path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        else:
            descriptor, name = tempfile.mkstemp(prefix="ddp-lab-flight-recorder-")
            path = Path(name)
        os.truncate(descriptor, CRASH_OFFSET)
        recorder = cls(descriptor, path)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        page = recorder._page
        page.rank, page.waiting, page.stalled = rank, -1, -1
        recorder.set_phase(-1, "starting")
        return recorder

    @classmethod
    def open(cls, path: Path) -> "FlightRecorder":
        """Another process's record.

        Raises:
            OSError: that process is on another node, or has ended.
        """
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)

    def unlink(self) -> None:
        """Remove the name of the file, once all its readers have opened it."""
        if not str(self.path).startswith("/proc/"):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self.unlink()
        del self._page  # with it goes the mapping
        os.close(self._descriptor)

    # The owner writes --------------------------------------------------------------------------------------------

    @property
    def crash_file(self) -> int:
        """A file descriptor for `faulthandler`, which writes behind the page."""
        os.lseek(self._descriptor, CRASH_OFFSET, os.SEEK_SET)
        return self._descriptor

    def set_phase(self, step: int, phase: str) -> None:
        self._page.step, self._page.phase = step, phase.encode()[:32]
        self._page.progress_s = time.time()

    def add(self, seq: int, kind: str, elements: int, dtype: str, group: str, root: int, parameter: int) -> int:
        """Record a collective that is about to be issued, and return its number on this rank, from 0."""
        page, now = self._page, time.time()
        number = page.count
        texts = (kind.encode(), dtype.encode(), group.encode())
        slot = _Slot(number, seq, elements, root, parameter, now, STATES.index(ISSUED), *texts)
        page.ring[number % RING_ENTRIES] = slot  # one copy, so that a reader hardly ever sees a half of it
        page.count, page.progress_s = number + 1, now
        return number

    def complete(self, number: int) -> None:
        self.set_state(number, COMPLETED)

    def set_state(self, number: int, state: str) -> None:
        """`state`: one of `calls.STATES`."""
        slot = self._page.ring[number % RING_ENTRIES]
        if slot.number == number:
            slot.state = STATES.index(state)
        self._page.progress_s = time.time()

    def set_waiting(self, number: int) -> None:
        """The owner's training thread waits for this collective; -1 for none."""
        self._page.waiting = number

    def set_stalled(self, number: int) -> None:
        """The owner's device does not get past this collective; -1 for none."""
        self._page.stalled = number

    def set_exit_reason(self, reason: ExitReason) -> None:
        """Record why the owner ends. A later call replaces the reason."""
        text = msgspec.json.encode(reason)
        if len(text) > TEXT_BYTES:
            text = msgspec.json.encode(replace(reason, traceback=(reason.traceback or "")[-3000:]))
        self._page.exit_reason = text

    def finish(self) -> None:
        """The owner has completed its run."""
        self._page.is_finished = True

    # Every process reads -----------------------------------------------------------------------------------------

    def owner_is_gone(self) -> bool:
        """Whether the owner's process has ended."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return True

    @property
    def is_finished(self) -> bool:
        return self._page.is_finished

    @property
    def exit_reason(self) -> ExitReason | None:
        with suppress(msgspec.DecodeError):  # there is none yet, or it is being written
            return msgspec.json.decode(self._page.exit_reason, type=ExitReason)
        return None

    @property
    def crash(self) -> str:
        """What `faulthandler` wrote. Empty if the process did not crash, or was killed."""
        return os.pread(self._descriptor, 65536, CRASH_OFFSET).decode(errors="replace")

    @property
    def progress_s(self) -> float:
        """As in `RankState`."""
        return self._page.progress_s

    @property
    def count(self) -> int:
        """How many collectives the owner has issued."""
        return self._page.count

    @property
    def is_blocked(self) -> bool:
        """Whether the owner's training thread waits for a collective."""
        return self._page.waiting >= 0

    def state(self) -> RankState:
        """What the owner does. A collective that is being overwritten at this moment is left out."""
        page, count = self._page, self.count
        found = {number: self._entry(number) for number in range(max(0, count - RING_ENTRIES), count)}
        entries = tuple(entry for entry in found.values() if entry is not None)
        phase = page.phase.decode(errors="replace")
        waits_for = next((found.get(number) for number in sorted((page.waiting, page.stalled)) if number >= 0), None)
        return RankState(page.rank, page.step, phase, entries, waits_for, page.progress_s)

    def _entry(self, number: int) -> Call | None:
        slot = _Slot.from_buffer_copy(self._page.ring[number % RING_ENTRIES])
        if slot.number != number:
            return None
        return Call(
            slot.seq,
            slot.kind.decode(),
            slot.elements,
            slot.dtype.decode(),
            slot.group.decode(),
            slot.root,
            slot.parameter,
            STATES[slot.state],
            slot.time_s,
        )
