"""A flight recorder: what a rank does, and why it ends, in memory that outlives its process.

Each rank keeps one file in memory. It holds the rank's step and phase, its latest collectives, why it ends, and what
Python wrote if it crashed. The other ranks of the node map this file when the run begins, so they can read it even
after the rank was killed by SIGKILL. Recording takes about a microsecond: it stores into mapped memory, and nothing
goes to a disk. The owner holds a lock on the file. The kernel releases the lock when the process ends, however it ends,
so the lock shows whether the owner is alive.
"""

import faulthandler
import fcntl
import mmap
import os
import tempfile
import time
from contextlib import suppress
from ctypes import Structure, c_bool, c_char, c_double, c_int32, c_int64, sizeof
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ddp_lab.collectives.calls import COMPLETED, ISSUED, Call
from ddp_lab.collectives.ranks import LONGEST_NAME
from ddp_lab.runtime.errors import AgreedError, place_in_own_file, printable, traceback_of, words_of
from ddp_lab.runtime.watch.phases import LOOP


@dataclass(frozen=True)
class RankState:
    """What a rank does or did last. Without a phase, nothing is known of it.

    `step`: optimizer steps done before this one; -1 outside training. `entries`: its latest collectives, oldest first.
    `waits_for`: the oldest collective in which its training thread or its device waits. `progress_s`: when it last
    issued or completed a collective or changed its phase, in seconds since the epoch.
    """

    rank: int = -1
    step: int = -1
    phase: str = ""
    entries: tuple[Call, ...] = ()
    waits_for: Call | None = None
    progress_s: float = 0.0

    @property
    def awaited(self) -> Call | None:
        """What it waits for, or else issued last."""
        return self.waits_for or next(reversed(self.entries), None)

    @property
    def waits_since_s(self) -> float:
        """When what it waits for was issued, or when it made progress last."""
        return self.waits_for.time_s if self.waits_for else self.progress_s

    @property
    def when(self) -> str:
        if self.step < 0:
            return f"while {self.phase}" if self.phase else ""
        return f"in step {self.step}" + (f" during {self.phase}" if self.phase != LOOP else "")

    @property
    def collective(self) -> str | None:
        if self.waits_for is not None:
            return f"in {self.waits_for}"
        if (last := self.awaited) is None:
            return None
        return f"after {last}" if last.state == COMPLETED else f"with {last} under way"

    def __str__(self) -> str:
        return f"{self.when}, {self.collective}" if self.collective else self.when


NOTHING_KNOWN = RankState()

# Why a rank ends, in its own words; `cause` finds the first cause of a run among these ------------------------------

MOST_CHARACTERS = 2000
"""Of a text: a flight recorder has little room."""
COMMUNICATION_WORDS = ("gloo", "nccl", "processgroup", "process group", "connection", "collective", "broken pipe")


@dataclass(frozen=True)
class ExitReason:
    """What a rank says when it ends.

    Attributes:
        kind: One of

            - `agreed`: an error that every rank raises;
            - `error`: an error that this rank raises for all ranks;
            - `failed`: an exception of this rank's own;
            - `collective`: a collective raised an exception;
            - `timeout`: a collective waited until its timeout;
            - `connection`: a collective lost its connection to another rank;
            - `signal`: this rank received a signal;
            - `orphaned`: `torchrun` has ended;
            - `mismatch`: ranks issued different collectives;
            - `noticed`: this rank saw that another one has ended.
        text: The exception, the name of the signal, or where the collectives differ.
        time_s: Seconds since the epoch.
    """

    kind: str
    text: str
    time_s: float
    traceback: str | None = None

    @classmethod
    def now(cls, kind: str, text: str, trace: str | None = None) -> "ExitReason":
        return cls(kind, printable(text[:MOST_CHARACTERS]), time.time(), trace)

    @classmethod
    def of(cls, error: BaseException, in_collective: bool) -> "ExitReason":
        """The reason of a rank whose training thread raised `error`, perhaps while it waited for a collective."""
        if isinstance(error, AgreedError):
            return cls.now("error", words_of(error))
        return cls.now(kind_of(error, in_collective), text_of(error), traceback_of(error))


def kind_of(error: BaseException, in_collective: bool) -> str:
    """`failed`, or `timeout`, `connection` or `collective` if communication raised the error."""
    text = words_of(error).lower()
    is_of_communication = isinstance(error, RuntimeError) and any(word in text for word in COMMUNICATION_WORDS)
    if not in_collective and not is_of_communication:
        return "failed"
    if "timed out" in text or "timeout" in text:
        return "timeout"
    return "connection" if "connection" in text or "broken pipe" in text or "reset by peer" in text else "collective"


def text_of(error: BaseException) -> str:
    """The exception in one line. If memory ran out, the line also says what to do."""
    lines = words_of(error).splitlines()
    text = (f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__) + place_in_own_file(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
        text = f"out of memory ({text}); use a smaller --global-batch-size or model, or raise --grad-accum-steps"
    elif "too many open files" in text.lower():
        text += "; raise ulimit -n"
    return text


# The file -------------------------------------------------------------------------------------------------------------

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


class FlightPage(Structure):
    """The whole file; what Python writes of a crash follows it. `count`: how many collectives the owner has issued.
    `waiting`, `stalled`: the number of the one that its training thread waits for, and of the one that its device does
    not get past; -1 for none. `is_finished`: it has completed its run. Others are as in `RankState`."""

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


CRASH_OFFSET = sizeof(FlightPage)


class FlightRecorder:
    """The record of one rank. Its owner writes it; every process of the node can read it."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self._descriptor = descriptor
        self.page = FlightPage.from_buffer(mmap.mmap(descriptor, CRASH_OFFSET))

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
        """Another process's record. Raises `OSError` if that process is on another node, or has ended."""
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

    def keep_crashes(self) -> None:
        """Let Python write after the page when the process crashes."""
        os.lseek(self._descriptor, CRASH_OFFSET, os.SEEK_SET)
        faulthandler.enable(file=self._descriptor)

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
