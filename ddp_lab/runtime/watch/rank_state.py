"""What a rank does or did last: its step, its phase and its latest collectives."""

from dataclasses import dataclass

from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.watch.phases import LOOP

ON_DEVICE = QUEUED, STARTED, COMPLETED = ("queued", "started", "completed")
"""How far a device is with a collective that it runs: not there yet, in it, past it."""
ISSUED = "issued"
STATES = (ISSUED, *ON_DEVICE)
"""Of a collective. One that is done when `Work.wait` returns goes from `issued` to `completed`."""


@dataclass(frozen=True)
class Entry:
    """A collective that a rank has issued.

    Attributes:
        seq: Sequence number in its process group, from 1.
        elements: Of the whole tensor: for a gather or scatter, of all ranks together.
        root: Rank in the group that sends or receives everything; -1 for collectives without a root.
        parameter: For an all-reduced gradient, the number of its trainable parameter, from 1; 0 if that is not known.
        state: One of `STATES`.
        time_s: When it was issued, in seconds since the epoch.
    """

    seq: int
    kind: str
    elements: int
    dtype: str
    group: str
    root: int
    parameter: int
    state: str
    time_s: float

    def __str__(self) -> str:
        size = f" of {self.elements} {self.dtype}" if self.elements else ""
        return f"{self.kind} #{self.seq}{size}"


@dataclass(frozen=True)
class RankState:
    """What a rank does or did last.

    Attributes:
        step: Optimizer steps done before this one; -1 outside training.
        entries: Its latest collectives, oldest first.
        waits_for: The oldest collective in which its training thread or its device waits; None if neither does.
        progress_s: When it last issued or completed a collective or changed its phase, in seconds since the epoch.
    """

    rank: int
    step: int
    phase: str
    entries: tuple[Entry, ...]
    waits_for: Entry | None
    progress_s: float

    @property
    def last(self) -> Entry | None:
        return self.entries[-1] if self.entries else None

    @property
    def when(self) -> str:
        if self.step < 0:
            return f"while {self.phase}"
        return f"in step {self.step}" + (f" during {self.phase}" if self.phase != LOOP else "")

    @property
    def collective(self) -> str | None:
        """The collective that it waits for, or the last one that it issued."""
        if self.waits_for is not None:
            return f"in {self.waits_for}"
        if self.last is None:
            return None
        return f"after {self.last}" if self.last.state == "completed" else f"with {self.last} under way"

    def __str__(self) -> str:
        return f"{self.when}, {self.collective}" if self.collective else self.when


@dataclass(frozen=True)
class RankNames:
    """Ranks in messages: their numbers, on a mesh with their places: `1, 3`, or `1 (dp 0, tp 1), 3 (dp 1, tp 1)`."""

    mesh: Mesh | None = None

    def __call__(self, *ranks: int) -> str:
        return ", ".join(f"{rank} ({self.mesh.describe(rank)})" if self.mesh else str(rank) for rank in ranks)


NUMBERS = RankNames()
"""Numbers alone."""
