"""Finds why a run ended: the first cause, not the ranks that died because of it.

When a rank is killed, other ranks fail with broken connections, and `torchrun` then stops the rest. Each of them may
look like the first one. So the reasons of all ranks are compared: a rank that vanished or failed by itself comes before
ranks whose collectives failed or timed out, and these come before ranks that were only told to stop.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ddp_lab.collectives.calls import (
    ON_DEVICE,
    QUEUED,
    STARTED,
    Call,
    behind,
    deadlock,
    first_difference,
    ranks_by_call,
    slow_devices,
)
from ddp_lab.collectives.ranks import ranks_of
from ddp_lab.record_format import Ending
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.watch.flight_recorder import NOTHING_KNOWN, ExitReason, RankState

STOPPED, FAILED, KILLED = "stopped", "failed", "killed"
HUNG, MISMATCHED, INTERRUPTED, LOST = "hung", "mismatched", "interrupted", "lost"
"""How a run may end (`docs/run-record.md`)."""


@dataclass(frozen=True)
class RankNames:
    """Ranks in messages: their numbers, on a mesh with their places: `1, 3`, or `1 (dp 0, tp 1), 3 (dp 1, tp 1)`."""

    mesh: Mesh | None = None

    def __call__(self, *ranks: int) -> str:
        return ", ".join(f"{rank} ({self.mesh.describe(rank)})" if self.mesh else str(rank) for rank in ranks)


NUMBERS = RankNames()
"""Numbers alone."""


@dataclass(frozen=True)
class RankReport:
    """What is known of a rank when the run ends.

    No `state` is known of a rank on another node that has not reported. `is_gone`: its process has ended. `crash`: what
    Python wrote when it crashed. `is_stopped`: it is stopped, for example by SIGSTOP.
    """

    state: RankState = NOTHING_KNOWN
    reason: ExitReason | None = None
    is_gone: bool = False
    crash: str = ""
    is_stopped: bool = False


Reports = Mapping[int, RankReport]
"""By rank."""


# Where ranks differ ---------------------------------------------------------------------------------------------------

ADVICE = "ranks must issue the same collectives in the same order"


@dataclass(frozen=True)
class Mismatch:
    """Collectives that do not fit together: `text` for the user, and by rank the collective in which it differs."""

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


# The first cause ------------------------------------------------------------------------------------------------------


def first_cause(reports: Reports, out_of_memory: bool = False, names: RankNames = NUMBERS) -> Ending:
    """What ended the run. `out_of_memory`: since it began, the kernel has killed a process because memory ran out."""
    # a rank that NCCL's watchdog aborts counts as waiting
    aborted = [rank for rank, report in reports.items() if _aborted_by_nccl(report)]
    waited = ExitReason.now("timeout", "NCCL aborted it")
    reports = {
        r: replace(report, reason=waited, is_gone=False) if r in aborted else report for r, report in reports.items()
    }
    reasons = {rank: report.reason for rank, report in reports.items() if report.reason is not None}

    def ranks_with(*kinds: str) -> list[int]:
        """Ranks that ended for such a reason, the earliest first."""
        return sorted((r for r, reason in reasons.items() if reason.kind in kinds), key=lambda r: reasons[r].time_s)

    # a rank that failed or vanished by itself
    states = {rank: report.state for rank, report in reports.items()}
    mismatch = find_mismatch(states, names, waiting=[rank for rank in states if not reports[rank].is_gone])
    gone = [rank for rank, report in reports.items() if report.is_gone and rank not in reasons]
    failed, signalled = ranks_with("failed", "error", "agreed"), ranks_with("signal")
    if failed and not gone:
        return _failed(reports[failed[0]], failed[0], names)
    if mismatch and (gone or aborted or not signalled):
        return _mismatched(states, mismatch)
    if gone:
        return _killed(reports, gone, out_of_memory, names)
    if signalled and not aborted:  # torchrun tells the others to stop
        return _interrupted(reports, signalled, names)
    # ranks whose collectives timed out or broke
    if timed_out := ranks_with("timeout"):
        ending = _hung(reports, timed_out, names)
        by_nccl = f"; NCCL aborted rank {names(*aborted)}" if aborted else ""
        return replace(ending, message=f"{ending.message}{by_nccl}")
    if in_collective := ranks_with("collective"):
        return _failed(reports[in_collective[0]], in_collective[0], names)
    return _lost(reports, names)


def _aborted_by_nccl(report: RankReport) -> bool:
    """Whether a process is gone because NCCL's watchdog aborted it (or a collective did, when the watchdog had failed)
    while its device waited. The watchdog's thread is none of Python's, so no thread is the current one then."""
    awaited, (first, _, lines) = report.state.awaited, report.crash.partition("\n")
    _, is_of_python, stack = lines.partition("Current thread ")
    is_torchs = not is_of_python or "torch/distributed/" in "".join(stack.splitlines()[1:2])
    is_open = awaited is not None and awaited.state in (QUEUED, STARTED)
    return report.is_gone and report.reason is None and first == "Fatal Python error: Aborted" and is_open and is_torchs


def _ending(
    how: str,
    rank: int,
    state: RankState,
    message: str,
    traceback: str | None = None,
    collective: str | None = None,
) -> Ending:
    step = state.step if state.step >= 0 else None
    return Ending(how, rank, step, state.phase or None, collective or state.collective, message, traceback)


def _failed(report: RankReport, rank: int, names: RankNames) -> Ending:
    state, reason = report.state, report.reason
    assert reason is not None
    if reason.kind in ("error", "agreed"):
        return _ending(FAILED, rank, state, reason.text)
    return _ending(FAILED, rank, state, f"rank {names(rank)} failed {state}: {reason.text}", reason.traceback)


def _killed(reports: Reports, gone: Sequence[int], out_of_memory: bool, names: RankNames) -> Ending:
    first = min(gone, key=lambda rank: reports[rank].state.progress_s)
    state, crash = reports[first].state, reports[first].crash
    ranks = f"rank {names(first)}" if len(gone) == 1 else f"ranks {names(*gone)}; first rank {names(first)}"
    if crash:
        end = f"crashed ({crash.splitlines()[0].removeprefix('Fatal Python error: ')})"
    else:
        end = "was killed (SIGKILL, or it exited without an error)"
    message = f"{ranks} {end} {state}".rstrip()
    if out_of_memory:
        message += "; the kernel killed a process because memory ran out: use a smaller --global-batch-size or model"
    elif not crash:
        message += "; if nobody killed it, look for the out-of-memory killer in dmesg"
    return _ending(KILLED, first, state, message, crash or None)


def _mismatched(states: Mapping[int, RankState], mismatch: Mismatch) -> Ending:
    """Ranks that differ may be in different steps. The rank that is furthest behind is in the step where they do."""
    rank = min(mismatch.calls, key=lambda rank: states[rank].step)
    message = f"{mismatch.text}; {ADVICE}; {states[rank].when}"
    return _ending(MISMATCHED, rank, states[rank], message, collective=str(mismatch.calls[rank]))


def _interrupted(reports: Reports, ranks: Sequence[int], names: RankNames) -> Ending:
    state, reason = reports[ranks[0]].state, reports[ranks[0]].reason
    assert reason is not None
    subject = "" if len(ranks) == len(reports) else f"rank {names(*sorted(ranks))} was "
    message = f"{subject}stopped by {reason.text}" + (f" while {state.phase}" if state.phase and state.step < 0 else "")
    return _ending(INTERRUPTED, min(ranks), state, message)


def _hung(reports: Reports, timed_out: Sequence[int], names: RankNames) -> Ending:
    """Ranks waited in a collective until its timeout. The cause is the rank of its group that did not join it. If that
    one waits itself, in another group, the cause is who did not join there."""
    states = {rank: report.state for rank, report in reports.items()}
    issued = {rank: state.entries for rank, state in states.items()}
    waiting = min(timed_out, key=lambda rank: states[rank].waits_since_s)
    # from who waits to who is missing, until that one does not wait itself
    stopped = [rank for rank in reports if rank not in timed_out and reports[rank].is_stopped]
    for _ in reports:
        awaited = states[waiting].awaited
        members = [rank for rank in reports if rank in ((awaited and ranks_of(awaited.group)) or reports)]
        other_ranks = [rank for rank in members if rank not in (*timed_out, waiting)]
        late = behind(issued, awaited) if awaited is not None else other_ranks
        missing = [rank for rank in other_ranks if rank in late]
        on_device: list[int] = []
        if not missing and awaited is not None and awaited.state in ON_DEVICE:
            place = awaited.group, awaited.seq
            at_it = {rank: call for rank, calls in issued.items() for call in calls if (call.group, call.seq) == place}
            missing = on_device = slow_devices(at_it)
        elif not missing:
            missing = other_ranks
        idle = [rank for rank in missing if not states[rank].waits_for]
        if stopped or on_device or idle or not missing:
            break
        waiting = missing[0]
    # the message
    missing = stopped or on_device or idle or missing
    waiting = next((rank for rank in timed_out if rank not in missing), waiting)
    state = states[waiting]
    seconds = f"{time.time() - state.waits_since_s:.0f} s" if state.phase else "its whole timeout"
    if not missing:
        subject = "every rank waits" if len(members) == len(reports) else f"ranks {names(*members)} wait"
        message = f"{subject} for another; rank {names(waiting)} for {seconds} {state}"
        return _ending(HUNG, waiting, state, message)
    first, state = missing[0], states[missing[0]]
    symptom = "is stopped (SIGSTOP)" if stopped else "hangs on its device" if on_device else "hangs"
    message = f"rank {names(first)} {symptom if state.phase or stopped else 'does not answer'} {state}".rstrip()
    if len(missing) > 1:
        message = f"ranks {names(*missing)} did not join; {message}"
    if waiting not in missing:
        message += f"; rank {names(waiting)} waited {seconds} for it in {awaited or 'a collective'}"
    return _ending(HUNG, first, state, message, collective=f"missing in {awaited}" if awaited else None)


def _lost(reports: Reports, names: RankNames) -> Ending:
    """Connections broke, and no rank is known to have failed."""
    silent = [rank for rank, report in reports.items() if report.reason is None]
    if silent:
        where = next((report.state for report in reports.values() if report.reason), "")
        message = f"rank {names(*silent)} cannot be reached any more (its node or the link is down); {where}"
        return _ending(LOST, silent[0], reports[silent[0]].state, message)
    first, reason = min(
        ((rank, report.reason) for rank, report in reports.items() if report.reason), key=lambda pair: pair[1].time_s
    )
    state = reports[first].state
    if reason.kind == "orphaned":
        return _ending(INTERRUPTED, first, state, f"torchrun has gone, so the ranks ended {state}")
    return _ending(LOST, first, state, f"rank {names(first)} lost a connection {state}: {reason.text}")
