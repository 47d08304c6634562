"""Why a rank ends, in its own words. `cause.py` finds the first cause of a run among the reasons of all its ranks."""

import time
from dataclasses import dataclass

from ddp_lab.runtime.errors import AgreedError, place_in_own_file, printable, traceback_of, words_of

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
