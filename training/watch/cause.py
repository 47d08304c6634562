"""Why a run ended, from what every rank last did and said: the first cause, not the ranks that died of it.

A rank that is killed makes others fail with broken connections, and `torchrun` then stops the rest; any of them may
look like the first. So each rank's word is weighed: a rank that vanished or failed by itself comes before those whose
collectives failed or timed out, and these before those that were only told to stop.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training.watch.board import Place
from training.watch.sequence import ADVICE, deadlock, difference, first_difference

COMPLETED, FAILED, KILLED, HUNG, MISMATCHED, INTERRUPTED, LOST = (
    "completed",
    "failed",
    "killed",
    "hung",
    "mismatched",
    "interrupted",
    "lost",
)
"""How a run may end (`docs/run-record.md`)."""


@dataclass(frozen=True)
class Statement:
    """What a rank says when it ends.

    Attributes:
        kind: `agreed` (an error that every rank raises), `error` (one that this rank raises for all), `failed` (an
            exception of its own), `collective` (a collective raised), `timeout` (the same, after waiting), `connection`
            (the same, since a rank had gone), `signal`, `orphaned` (`torchrun` has gone), `mismatch` (ranks issued
            different collectives), or `noticed` (it saw that another has ended).
        text: The exception, the signal's name, or where sequences part.
        time_s: Seconds since the epoch.
    """

    kind: str
    text: str
    time_s: float
    traceback: str | None = None


@dataclass(frozen=True)
class Seen:
    """What is known of a rank when the run ends.

    Attributes:
        place: None if it is on another node and said nothing.
        is_gone: Its process has ended.
        crash: What Python wrote when its process crashed.
        is_stopped: Its process is stopped, as by SIGSTOP.
    """

    place: Place | None
    statement: Statement | None
    is_gone: bool = False
    crash: str = ""
    is_stopped: bool = False


@dataclass(frozen=True)
class Ending:
    """How a run ended: the value of `ended` in its record."""

    how: str
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    collective: str | None = None
    message: str | None = None
    traceback: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_cause(seen: Mapping[int, Seen], out_of_memory: bool = False) -> Ending:
    """What ended the run.

    Args:
        seen: By rank; all ranks are there.
        out_of_memory: The kernel has killed a process for want of memory since the run began.
    """
    said = {rank: one.statement for rank, one in seen.items() if one.statement is not None}
    gone = [rank for rank, one in seen.items() if one.is_gone and rank not in said]
    failed = sorted((one.time_s, rank) for rank, one in said.items() if one.kind in ("failed", "error", "agreed"))
    places = {rank: one.place for rank, one in seen.items() if one.place is not None}
    parting = difference({rank: place.entries for rank, place in places.items()})
    parting = parting or deadlock({rank: place for rank, place in places.items() if not seen[rank].is_gone})
    if failed and not gone:
        return _failed(seen, failed[0][1])
    if parting and (gone or not any(one.kind == "signal" for one in said.values())):
        return _mismatched(seen, parting)
    if gone:
        return _killed(seen, gone, out_of_memory)
    if failed:
        return _failed(seen, failed[0][1])
    signalled = sorted((one.time_s, rank) for rank, one in said.items() if one.kind == "signal")
    if signalled:
        return _interrupted(seen, [rank for _, rank in signalled])
    waited = [rank for rank, one in said.items() if one.kind == "timeout"]
    if waited:
        return _hung(seen, waited)
    collective = sorted((one.time_s, rank) for rank, one in said.items() if one.kind == "collective")
    if collective:
        return _failed(seen, collective[0][1])
    return _lost(seen)


def _ending(how: str, seen: Mapping[int, Seen], rank: int, message: str, traceback: str | None = None) -> Ending:
    place = seen[rank].place
    if place is None:
        return Ending(how, rank, message=message, traceback=traceback)
    step = place.step if place.step >= 0 else None
    return Ending(how, rank, step, place.phase, place.collective, message, traceback)


def _failed(seen: Mapping[int, Seen], rank: int) -> Ending:
    statement = seen[rank].statement
    assert statement is not None
    if statement.kind != "failed" and statement.kind != "collective":
        return _ending(FAILED, seen, rank, statement.text)
    message = f"rank {rank} failed {seen[rank].place or ''}: {statement.text}"
    return _ending(FAILED, seen, rank, message, statement.traceback)


def _killed(seen: Mapping[int, Seen], gone: Sequence[int], out_of_memory: bool) -> Ending:
    first = min(gone, key=lambda rank: place.since_s if (place := seen[rank].place) else 0.0)
    one = seen[first]
    ranks = f"rank {first}" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))}; first rank {first}"
    if one.crash:
        what = f"crashed ({one.crash.splitlines()[0].removeprefix('Fatal Python error: ')})"
    else:
        what = "was killed (SIGKILL, or it exited without a word)"
    message = f"{ranks} {what} {one.place or ''}".rstrip()
    if out_of_memory:
        message += "; the kernel has killed a process for want of memory: use a smaller --global-batch-size or model"
    elif not one.crash:
        message += "; if nobody did, look into dmesg for the kernel's out-of-memory killer"
    return _ending(KILLED, seen, first, message, one.crash or None)


def _mismatched(seen: Mapping[int, Seen], parting: str) -> Ending:
    """Ranks that differ may be in different steps: the one that is behind has them both before it."""
    places = {rank: one.place for rank, one in seen.items() if one.place is not None}
    found = first_difference({rank: place.entries for rank, place in places.items()})
    found = found or {rank: place.waits_for for rank, place in places.items() if place.waits_for}
    rank = min(found, key=lambda rank: places[rank].step)
    message = f"{parting}; {ADVICE}; {places[rank].when}"
    ending = _ending(MISMATCHED, seen, rank, message)
    return Ending(**{**ending.as_dict(), "collective": str(found[rank])})


def _interrupted(seen: Mapping[int, Seen], ranks: Sequence[int]) -> Ending:
    statement, place = seen[ranks[0]].statement, seen[ranks[0]].place
    assert statement is not None
    who = "" if len(ranks) == len(seen) else f"rank {', '.join(map(str, sorted(ranks)))} was "
    message = f"{who}stopped by {statement.text}" + (f" {place.when}" if place else "")
    return _ending(INTERRUPTED, seen, min(ranks), message)


def _hung(seen: Mapping[int, Seen], waited: Sequence[int]) -> Ending:
    """Ranks waited in a collective in vain: who did not come?"""
    waiting = min(waited, key=lambda rank: place.since_s if (place := seen[rank].place) else 0.0)
    place = seen[waiting].place
    awaited = (place.waits_for or place.last) if place else None
    missing = [rank for rank in seen if rank not in waited and _is_behind(seen[rank], awaited)]
    missing = missing or [rank for rank in seen if rank not in waited]
    seconds = f"{time.time() - place.since_s:.0f} s" if place else "its whole timeout"
    if not missing:
        return _ending(HUNG, seen, waiting, f"every rank waits for another; rank {waiting} for {seconds} {place or ''}")
    rank = missing[0]
    one = seen[rank]
    state = "is stopped (SIGSTOP)" if one.is_stopped else "hangs" if one.place else "is not heard of"
    message = f"rank {rank} {state} {one.place or ''}".rstrip()
    if len(missing) > 1:
        message = f"ranks {', '.join(map(str, missing))} do not come; {message}"
    message += f"; rank {waiting} waited {seconds} for it in {awaited or 'a collective'}"
    ending = _ending(HUNG, seen, rank, message)
    return Ending(**{**ending.as_dict(), "collective": f"missing in {awaited}" if awaited else None})


def _is_behind(one: Seen, awaited: Any) -> bool:
    if one.place is None or awaited is None:
        return True
    issued = [entry.seq for entry in one.place.entries if entry.group == awaited.group]
    return max(issued, default=0) < awaited.seq


def _lost(seen: Mapping[int, Seen]) -> Ending:
    """Connections broke, and no rank is known to have failed."""
    unheard = [rank for rank, one in seen.items() if one.statement is None]
    if unheard:
        others = ", ".join(map(str, unheard))
        where = next((one.place for one in seen.values() if one.statement and one.place), None)
        message = f"rank {others} cannot be reached any more (its node or the link is down); {where or ''}"
        return _ending(LOST, seen, unheard[0], message)
    _, first = min((one.statement.time_s, rank) for rank, one in seen.items() if one.statement)
    statement, place = seen[first].statement, seen[first].place
    assert statement is not None
    if statement.kind == "orphaned":
        return _ending(INTERRUPTED, seen, first, f"torchrun has gone, so the ranks ended {place}")
    return _ending(LOST, seen, first, f"rank {first} lost a connection {place}: {statement.text}")
