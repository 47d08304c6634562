"""Where a rank is, in memory that its process does not take along when it dies.

Each rank keeps one page file: the step and phase it is in, a ring of its latest collectives, what it said at its end,
and what Python said of a crash. The others on its node map the file when the group is joined, so that after a SIGKILL
they can still read how far it came. Writing is a few stores into mapped memory, about a microsecond; nothing goes to a
disk.
A lock on the file tells whether its owner lives: the kernel lifts it when the process ends, however it does.
"""

import fcntl
import json
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RING_ENTRIES = 2048
_ENTRY = struct.Struct("<qqdqiiB24s16s24s")
_PLACE = struct.Struct("<q24sd")  # step, phase, when it came there
_STATEMENT = struct.Struct("<i")
_RANK_AT, _PLACE_AT, _COUNT_AT, _WAITING_AT, _BEAT_AT, _STATEMENT_AT = 0, 16, 64, 72, 80, 88
_RING_AT, _TEXT_BYTES = 128, 32768
_TEXT_AT = _RING_AT + RING_ENTRIES * _ENTRY.size
_CRASH_AT = _TEXT_AT + _TEXT_BYTES
_INTEGER, _TIME = struct.Struct("<q"), struct.Struct("<d")
STATES = ("issued", "completed")
BETWEEN = "training loop"
"""The phase of a step that is in none of its parts."""
FINISHED = -1
"""Length of the statement of a rank that ended well."""


@dataclass(frozen=True)
class Entry:
    """A collective that a rank has issued.

    Attributes:
        seq: Its number in its group, from 1.
        elements: Of the whole: of what is gathered or scattered, those of all ranks.
        root: Rank in the group that sends or receives all; -1 where there is none.
        identity: Of a gradient that is all-reduced: the number of its parameter, from 1; 0 where that is not known.
        time_s: Seconds since the epoch when it was issued.
    """

    seq: int
    kind: str
    elements: int
    dtype: str
    group: str
    root: int
    identity: int
    state: str
    time_s: float

    def __str__(self) -> str:
        size = f" of {self.elements} {self.dtype}" if self.elements else ""
        return f"{self.kind} #{self.seq}{size}"


@dataclass(frozen=True)
class Place:
    """Where a rank is or was.

    Attributes:
        step: Optimizer steps done before this one; -1 before training.
        entries: The latest collectives, oldest first.
        waits_for: The one whose end it awaits; None if it is at work.
        since_s: When it last issued or completed a collective, or changed its phase; seconds since the epoch.
        beat_s: When its watcher was last alive.
    """

    rank: int
    step: int
    phase: str
    entries: tuple[Entry, ...]
    waits_for: Entry | None
    since_s: float
    beat_s: float

    @property
    def last(self) -> Entry | None:
        return self.entries[-1] if self.entries else None

    @property
    def when(self) -> str:
        if self.step < 0:
            return f"while {self.phase}"
        return f"in step {self.step}" + (f" during {self.phase}" if self.phase != BETWEEN else "")

    @property
    def collective(self) -> str | None:
        """The collective that it is in, or after which it was lost."""
        if self.waits_for is not None:
            return f"in {self.waits_for}"
        if self.last is None:
            return None
        return f"with {self.last} under way" if self.last.state == "issued" else f"after {self.last}"

    def __str__(self) -> str:
        return f"{self.when}, {self.collective}" if self.collective else self.when

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Place":
        waits_for = values["waits_for"]
        return cls(
            **{
                **values,
                "entries": tuple(Entry(**entry) for entry in values["entries"]),
                "waits_for": Entry(**waits_for) if waits_for else None,
            }
        )


class Board:
    """The page of one rank: written by its owner, read by every other process of its node."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _CRASH_AT)

    @classmethod
    def make(cls, rank: int) -> "Board":
        """A new page, which this process owns."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("ddp-lab-board")
            path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        else:
            descriptor, name = tempfile.mkstemp(prefix="ddp-lab-board-")
            path = Path(name)
        os.truncate(descriptor, _CRASH_AT)
        board = cls(descriptor, path)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        _INTEGER.pack_into(board._memory, _RANK_AT, rank)
        _INTEGER.pack_into(board._memory, _WAITING_AT, -1)
        board.set_place(-1, "starting")
        return board

    @classmethod
    def open(cls, path: Path) -> "Board":
        """Another process's page.

        Raises:
            OSError: it is on another node, or its process has gone.
        """
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)

    def hide(self) -> None:
        """The file needs its name no more, now that all who read it have it open."""
        if not str(self.path).startswith("/proc/"):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self.hide()
        self._memory.close()
        os.close(self._descriptor)

    # The owner's side ---------------------------------------------------------------------------------------------

    @property
    def crash_file(self) -> int:
        """A file descriptor whose writes land behind the page, for `faulthandler`."""
        os.lseek(self._descriptor, _CRASH_AT, os.SEEK_SET)
        return self._descriptor

    def set_place(self, step: int, phase: str) -> None:
        _PLACE.pack_into(self._memory, _PLACE_AT, step, phase.encode(), time.time())

    def touch(self, now: float) -> None:
        """Something went forward."""
        _TIME.pack_into(self._memory, _PLACE_AT + _PLACE.size - _TIME.size, now)

    def add(self, seq: int, kind: bytes, elements: int, dtype: bytes, group: bytes, root: int, identity: int) -> int:
        """A collective is about to be issued; answers with its number on this rank, from 0."""
        number = self.count()
        now = time.time()
        at = _RING_AT + number % RING_ENTRIES * _ENTRY.size
        _ENTRY.pack_into(self._memory, at, number, seq, now, elements, root, identity, 0, kind, dtype, group)
        _INTEGER.pack_into(self._memory, _COUNT_AT, number + 1)
        self.touch(now)
        return number

    def complete(self, number: int) -> None:
        at = _RING_AT + number % RING_ENTRIES * _ENTRY.size
        if _INTEGER.unpack_from(self._memory, at)[0] == number:
            self._memory[at + 40] = 1  # the field `state`
        self.touch(time.time())

    def set_waiting(self, number: int) -> None:
        """The owner awaits the end of a collective; -1: it goes on."""
        _INTEGER.pack_into(self._memory, _WAITING_AT, number)

    def beat(self) -> None:
        _TIME.pack_into(self._memory, _BEAT_AT, time.time())

    def state(self, statement: Mapping[str, Any]) -> None:
        """Leave a statement, the last one counts."""
        text = json.dumps(statement).encode()
        if len(text) > _TEXT_BYTES:
            text = json.dumps({**statement, "traceback": None, "text": str(statement["text"])[:2000]}).encode()
        self._memory[_TEXT_AT : _TEXT_AT + len(text)] = text
        _STATEMENT.pack_into(self._memory, _STATEMENT_AT, len(text))

    def finish(self) -> None:
        """The owner ends well."""
        _STATEMENT.pack_into(self._memory, _STATEMENT_AT, FINISHED)

    # The readers' side --------------------------------------------------------------------------------------------

    def is_abandoned(self) -> bool:
        """Whether the owner has gone."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return True

    def is_finished(self) -> bool:
        return self._statement_length() == FINISHED

    def statement(self) -> dict[str, Any] | None:
        length = self._statement_length()
        if length <= 0:
            return None
        with suppress(ValueError):  # it is being written at this moment
            return json.loads(self._memory[_TEXT_AT : _TEXT_AT + length])
        return None

    def _statement_length(self) -> int:
        return _STATEMENT.unpack_from(self._memory, _STATEMENT_AT)[0]

    def crash(self) -> str:
        """What `faulthandler` wrote; empty if the process did not crash, or was killed."""
        return os.pread(self._descriptor, 65536, _CRASH_AT).decode(errors="replace")

    def since_s(self) -> float:
        """When the owner last went forward."""
        return _TIME.unpack_from(self._memory, _PLACE_AT + _PLACE.size - _TIME.size)[0]

    def count(self) -> int:
        """How many collectives the owner has issued."""
        return _INTEGER.unpack_from(self._memory, _COUNT_AT)[0]

    def place(self, latest: int = RING_ENTRIES) -> Place:
        """Where the owner is, with its latest collectives. An entry that is written meanwhile is left out."""
        (rank,) = _INTEGER.unpack_from(self._memory, _RANK_AT)
        step, phase, since = _PLACE.unpack_from(self._memory, _PLACE_AT)
        count = self.count()
        (waiting,) = _INTEGER.unpack_from(self._memory, _WAITING_AT)
        numbered = {number: self._entry(number) for number in range(max(0, count - latest), count)}
        entries = tuple(entry for entry in numbered.values() if entry is not None)
        (beat,) = _TIME.unpack_from(self._memory, _BEAT_AT)
        return Place(rank, step, _text(phase), entries, numbered.get(waiting), since, beat)

    def _entry(self, number: int) -> Entry | None:
        at = _RING_AT + number % RING_ENTRIES * _ENTRY.size
        found, seq, issued, elements, root, identity, state, kind, dtype, group = _ENTRY.unpack_from(self._memory, at)
        if found != number:
            return None
        return Entry(
            seq, _text(kind), elements, _text(dtype), _text(group), root, identity, STATES[min(state, 1)], issued
        )


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
