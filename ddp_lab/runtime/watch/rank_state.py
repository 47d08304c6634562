"""What a rank does or did last, and why it ends; and where ranks differ in their latest collectives."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ddp_lab.collectives.calls import COMPLETED, Call, deadlock, first_difference, ranks_by_call
from ddp_lab.runtime.errors import AgreedError, place_in_own_file, printable, traceback_of, words_of
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.watch.phases import LOOP


@dataclass(frozen=True)
class RankState:
    """What a rank does or did last. Without a phase, nothing is known of it.

    Attributes:
        step: Optimizer steps done before this one; -1 outside training.
        entries: Its latest collectives, oldest first.
        waits_for: The oldest collective in which its training thread or its device waits; None if neither does.
        progress_s: When it last issued or completed a collective or changed its phase, in seconds since the epoch.
    """

    rank: int = -1
    step: int = -1
    phase: str = ""
    entries: tuple[Call, ...] = ()
    waits_for: Call | None = None
    progress_s: float = 0.0

    @property
    def last(self) -> Call | None:
        return self.entries[-1] if self.entries else None

    @property
    def awaited(self) -> Call | None:
        """What it waits for, or else issued last."""
        return self.waits_for or self.last

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
        """The collective that it waits for, or the last one that it issued."""
        if self.waits_for is not None:
            return f"in {self.waits_for}"
        if self.last is None:
            return None
        return f"after {self.last}" if self.last.state == COMPLETED else f"with {self.last} under way"

    def __str__(self) -> str:
        return f"{self.when}, {self.collective}" if self.collective else self.when


UNKNOWN = RankState()


@dataclass(frozen=True)
class RankNames:
    """Ranks in messages: their numbers, on a mesh with their places: `1, 3`, or `1 (dp 0, tp 1), 3 (dp 1, tp 1)`."""

    mesh: Mesh | None = None

    def __call__(self, *ranks: int) -> str:
        return ", ".join(f"{rank} ({self.mesh.describe(rank)})" if self.mesh else str(rank) for rank in ranks)


NUMBERS = RankNames()
"""Numbers alone."""

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


# Where ranks differ ---------------------------------------------------------------------------------------------------

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
