"""What a rank does or did last: its step, its phase and its latest collectives; and where ranks differ in these."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ddp_lab.collectives.calls import COMPLETED, Call, deadlock, first_difference, ranks_by_call
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.watch.phases import LOOP


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
    entries: tuple[Call, ...]
    waits_for: Call | None
    progress_s: float

    @property
    def last(self) -> Call | None:
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
        return f"after {self.last}" if self.last.state == COMPLETED else f"with {self.last} under way"

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

ADVICE = "ranks must issue the same collectives in the same order"


@dataclass(frozen=True)
class Mismatch:
    """Collectives that do not fit together.

    Attributes:
        text: What differs, for the user.
        calls: By rank, the collective in which it differs from the others.
    """

    text: str
    calls: Mapping[int, Call]


def find_mismatch(
    states: Mapping[int, RankState], names: RankNames = NUMBERS, waiting: Collection[int] = ()
) -> Mismatch | None:
    """The first collective of a process group in which ranks differ; or those of different groups in which the ranks
    `waiting` wait for each other for ever. Only if no other rank can help them may they be named."""
    if calls := first_difference({rank: state.entries for rank, state in states.items()}):
        number = next(iter(calls.values())).seq
        parts = [f"rank {names(*ranks)} {text}" for text, ranks in ranks_by_call(calls).items()]
        return Mismatch(f"collective #{number} differs between ranks: {'; '.join(parts)}", calls)
    waits_for = {rank: call for rank in waiting if (call := states[rank].waits_for)}
    missing = deadlock({rank: states[rank].entries for rank in waiting}, waits_for)
    parts = [
        f"rank {names(rank)} waits in {call} ({call.group}), which rank {names(*missing[rank])} has not issued"
        for rank, call in waits_for.items()
        if rank in missing
    ]
    return Mismatch(f"collective differs between ranks: {'; '.join(parts)}", waits_for) if parts else None
