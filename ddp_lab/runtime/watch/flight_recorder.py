"""A flight recorder: what a rank does, in memory that outlives its process.

Each rank keeps one file in memory. It holds the rank's step and phase, its latest collectives, why it ends, and what
Python wrote if it crashed. The other ranks of the node map this file when the run begins, so they can read it even
after the rank was killed by SIGKILL. Recording takes about a microsecond: it stores into mapped memory, and nothing
goes to a disk. The owner holds a lock on the file. The kernel releases the lock when the process ends, however it ends,
so the lock shows whether the owner is alive.
"""

import fcntl
import mmap
import os
import tempfile
import time
from contextlib import suppress
from ctypes import Structure, c_bool, c_char, c_double, c_int32, c_int64, sizeof
from dataclasses import replace
from pathlib import Path

import msgspec

from ddp_lab.collectives.calls import ISSUED, Call
from ddp_lab.collectives.ranks import LONGEST_NAME
from ddp_lab.runtime.watch.rank_state import ExitReason, RankState

RING_ENTRIES = 2048
TEXT_BYTES = 32768


class Slot(Structure):
    """A collective in the file: its number on this rank, from 0, and the fields of a `Call`."""

    _fields_ = (
        ("number", c_int64),
        ("seq", c_int64),
        ("kind", c_char * 24),
        ("elements", c_int64),
        ("dtype", c_char * 16),
        ("group", c_char * LONGEST_NAME),
        ("root", c_int32),
        ("parameter", c_int32),
        ("state", c_char * 16),
        ("time_s", c_double),
    )


class Page(Structure):
    """The whole file; what Python writes of a crash follows it.

    `pid`: the owner's process. `rank`, `step`, `phase` and `progress_s` are as in `RankState`. `count`: how many
    collectives the owner has issued. `waiting`, `stalled`: the number of the one that its training thread waits for,
    and of the one that its device does not get past; -1 for none. `is_finished`: it has completed its run.
    """

    _fields_ = (
        ("rank", c_int64),
        ("pid", c_int64),
        ("step", c_int64),
        ("phase", c_char * 32),
        ("progress_s", c_double),
        ("count", c_int64),
        ("waiting", c_int64),
        ("stalled", c_int64),
        ("is_finished", c_bool),
        ("exit_reason", c_char * TEXT_BYTES),
        ("ring", Slot * RING_ENTRIES),
    )


CRASH_OFFSET = sizeof(Page)


class FlightRecorder:
    """The record of one rank. Its owner writes it; every process of the node can read it."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self._descriptor = descriptor
        self.page = Page.from_buffer(mmap.mmap(descriptor, CRASH_OFFSET))

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
        page = recorder.page
        page.rank, page.pid, page.waiting, page.stalled = rank, os.getpid(), -1, -1
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
        del self.page  # with it goes the mapping
        os.close(self._descriptor)

    # The owner writes --------------------------------------------------------------------------------------------

    @property
    def crash_file(self) -> int:
        """A file descriptor for `faulthandler`, which writes behind the page."""
        os.lseek(self._descriptor, CRASH_OFFSET, os.SEEK_SET)
        return self._descriptor

    def set_phase(self, step: int, phase: str) -> None:
        self.page.step, self.page.phase, self.page.progress_s = step, phase.encode()[:32], time.time()

    def add(self, seq: int, kind: str, elements: int, dtype: str, group: str, root: int, parameter: int) -> int:
        """Record a collective that is about to be issued, and return its number."""
        page, now = self.page, time.time()
        number, texts = page.count, (kind.encode(), elements, dtype.encode(), group.encode())
        slot = Slot(number, seq, *texts, root, parameter, ISSUED.encode(), now)
        page.ring[number % RING_ENTRIES] = slot  # one copy, so that a reader hardly ever sees a half of it
        page.count, page.progress_s = number + 1, now
        return number

    def set_state(self, number: int, state: str, before: str | None = None) -> None:
        """`state`: as in `Call`. `before`: only if that is the state now."""
        slot = self.page.ring[number % RING_ENTRIES]
        if slot.number == number and before in (None, slot.state.decode()):
            slot.state = state.encode()
        self.page.progress_s = time.time()

    def set_exit_reason(self, reason: ExitReason) -> None:
        """Record why the owner ends. A later call replaces the reason."""
        text = msgspec.json.encode(reason)
        if len(text) > TEXT_BYTES:
            text = msgspec.json.encode(replace(reason, traceback=(reason.traceback or "")[-3000:]))
        self.page.exit_reason = text

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
    def exit_reason(self) -> ExitReason | None:
        with suppress(msgspec.DecodeError):  # there is none yet, or it is being written
            return msgspec.json.decode(self.page.exit_reason, type=ExitReason)
        return None

    @property
    def crash(self) -> str:
        """What `faulthandler` wrote. Empty if the process did not crash, or was killed."""
        return os.pread(self._descriptor, 65536, CRASH_OFFSET).decode(errors="replace")

    def state(self) -> RankState:
        """What the owner does. A collective that is being overwritten at this moment is left out."""
        page, count = self.page, self.page.count
        calls = {number: self._call(number) for number in range(max(0, count - RING_ENTRIES), count)}
        waits_for = next((calls.get(number) for number in sorted((page.waiting, page.stalled)) if number >= 0), None)
        entries, phase = tuple(filter(None, calls.values())), page.phase.decode(errors="replace")
        return RankState(page.rank, page.step, phase, entries, waits_for, page.progress_s)

    def _call(self, number: int) -> Call | None:
        slot = Slot.from_buffer_copy(self.page.ring[number % RING_ENTRIES])
        if slot.number != number:
            return None
        texts = (slot.kind, slot.dtype, slot.group, slot.state)
        kind, dtype, group, state = (text.decode(errors="replace") for text in texts)
        return Call(slot.seq, kind, slot.elements, dtype, group, slot.root, slot.parameter, state, slot.time_s)
