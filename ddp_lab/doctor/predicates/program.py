"""Ranks compared with each other: what they issued, how far they came, which versions they run."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from ddp_lab.collectives.ranks import ranks_in_words
from ddp_lab.doctor.comparison import evidence, waiting
from ddp_lab.doctor.facts import EARLY, Facts, Match
from ddp_lab.doctor.reading.stacks import Stack
from ddp_lab.doctor.reading.texts import Line, printable
from ddp_lab.doctor.reading.watchdog import Status, Timeout

POINT_TO_POINT = {"SEND", "RECV", "RECVANYSOURCE", "UNKNOWN"}
"""torch's names of calls that are not the same on all ranks of a group. `UNKNOWN` may be such a call."""
COALESCED = "COALESCED"
"""torch's name of coalesced calls: collectives if it has their elements, else sends and receives."""
EVEN = {"ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE"}
"""Collectives that move as many elements on each rank."""
EARLY_HANG = "It is one of the first in its group: suspect the connection (network, P2P), or a rank that never came."
LATE_HANG = "The group worked {times} times before: look for a rank that is late, ended or in another branch first."
_PLACE = ("rank", "step", "phase", "collective")


def different_collectives(facts: Facts) -> Match | None:
    """Ranks issued different collectives under one number of one group: by flight recorder, or by what timed out."""
    if match := _divergence(facts, "differ"):
        return match
    return _different([timeout for timeout in facts.timeouts if timeout.group is not None and timeout.in_job])


def different_collectives_of_unknown_groups(facts: Facts) -> Match | None:
    """The same, for timeouts of torch before 2.3. They name no group, so they may be of two groups."""
    return _different([timeout for timeout in facts.timeouts if timeout.group is None])


def _different(timeouts: list[Timeout]) -> Match | None:
    by_call: dict[tuple[object, ...], list[Timeout]] = defaultdict(list)
    for timeout in timeouts:
        if _is_collective(timeout) and timeout.seq is not None and timeout.rank is not None:
            by_call[timeout.attempt, timeout.group, timeout.seq].append(timeout)
    for (_, group, seq), of_call in sorted(by_call.items(), key=lambda item: str(item[0])):
        if _are_several_groups(of_call):
            continue
        differing = {_call(timeout): timeout for timeout in of_call}
        if len(differing) > 1 and len({timeout.rank for timeout in differing.values()}) > 1:
            calls = ", ".join(f"rank {t.rank} {' of '.join(filter(None, _call(t)))}" for t in differing.values())
            where = f" of group {printable(str(group))}" if group is not None else ""
            return Match([t.line for t in differing.values()], [f"Under number {seq}{where}: {calls} elements."])
    return None


def _are_several_groups(members: Sequence[Timeout | Status]) -> bool:
    """Whether two ranks of the job have one rank in the group: then groups of one name are more than one."""
    ranks = {(member.rank, member.local) for member in members if member.in_job}
    return len({local for _, local in ranks}) < len({rank for rank, _ in ranks})


def _is_collective(timeout: Timeout) -> bool:
    return timeout.kind not in POINT_TO_POINT and (timeout.kind != COALESCED or timeout.elements[0] is not None)


def _call(timeout: Timeout) -> tuple[str, str]:
    """What must be the same on all ranks: the kind, and the elements of kinds that move as many on each."""
    is_even = timeout.kind in EVEN or timeout.kind.startswith(COALESCED)
    return timeout.kind, (timeout.elements[0] or "") if is_even else ""


def rank_behind(facts: Facts) -> Match | None:
    """A rank never issued the collective that ran out of time on others: by flight recorder, or by the watchdog."""
    if match := _divergence(facts, "behind"):
        return match
    by_group: dict[tuple[int, str], list[Status]] = defaultdict(list)
    for status in facts.statuses:
        by_group[status.attempt, status.group].append(status)
    for (_, group), statuses in by_group.items():
        if _are_several_groups(statuses):
            continue
        stuck = max((status.timed_out for status in statuses if status.timed_out is not None), default=None)
        behind = {status.rank: status for status in statuses if stuck is not None and status.enqueued < stuck}
        if behind:
            least = min(status.enqueued for status in behind.values())
            local = "" if all(status.in_job for status in statuses) else " (numbers in the group)"
            sentence = (
                f"Collective {stuck} of group {printable(group)} ran out of time; {ranks_in_words(behind)}{local} "
                f"issued only {max(least, 0)} of that group."
            )
            stopped = next(status.line for status in statuses if status.timed_out == stuck)
            return Match([*(status.line for status in behind.values()), stopped], [sentence])
    return _waits_in_an_earlier(facts.timeouts)


def _waits_in_an_earlier(timeouts: Sequence[Timeout]) -> Match | None:
    """Ranks give up at different numbers of one group. Those at the lowest are behind: the others have finished it."""
    by_group: dict[tuple[int, str], dict[int, Timeout]] = defaultdict(dict)
    for timeout in timeouts:
        if timeout.group is not None and timeout.in_job and _is_collective(timeout) and timeout.seq is not None:
            first = by_group[timeout.attempt, timeout.group].setdefault(timeout.rank or 0, timeout)
            if timeout.seq < (first.seq or 0):
                by_group[timeout.attempt, timeout.group][timeout.rank or 0] = timeout
    for (_, group), by_rank in by_group.items():
        numbers = sorted({timeout.seq or 0 for timeout in by_rank.values()})
        if len(numbers) > 1 and not _are_several_groups([*by_rank.values()]):
            behind = [rank for rank, timeout in by_rank.items() if timeout.seq == numbers[0]]
            sentence = (
                f"{waiting(behind)} in collective {numbers[0]} of group {printable(group)}, "
                f"{waiting(by_rank.keys() - behind).lower()} in a later one."
            )
            return Match([timeout.line for timeout in by_rank.values()], [sentence])
    return None


def rank_without_dump(facts: Facts) -> Match | None:
    """A rank left no flight record, and all others wait in a collective."""
    return _divergence(facts, "missing")


def stuck_together(facts: Facts) -> Match | None:
    """All ranks have issued a collective, and none has finished it."""
    return _divergence(facts, "stuck")


def _divergence(facts: Facts, kind: str) -> Match | None:
    divergence = next((divergence for divergence in facts.divergences if divergence.kind == kind), None)
    return Match(evidence(divergence, facts.dumps), divergence.sentences) if divergence else None


def stacks_differ(facts: Facts) -> Match | None:
    """The outermost frame at which the stacks of the processes differ, with the smallest group first.

    Processes of different programs share no frame, and are not compared. A process whose stack changes does not hang.
    """
    paths = [stack.frames[::-1] for stack in facts.stacks]
    parts = next((i for i, frames in enumerate(zip_longest(*paths)) if len(set(frames)) > 1), 0)
    places: dict[str | None, list[Stack]] = defaultdict(list)
    for stack, path in zip(facts.stacks, paths, strict=True):
        places[path[parts] if parts < len(path) else None].append(stack)
    names = [{stack.name for stack in stacks} for stacks in places.values()]
    has_moved = len(set().union(*names)) < sum(map(len, names))
    if len(places) < 2 or has_moved or len({path[0].rpartition(":")[0] for path in paths}) > 1:
        return None
    details = [
        f"{', '.join(stack.name for stack in group[:8]).capitalize()}: "
        f"{printable(place or 'nothing more')}, and there in {printable(group[0].frames[0])}."
        for place, group in sorted(places.items(), key=lambda item: len(item[1]))
    ]
    return Match([stack.line for group in sorted(places.values(), key=len) for stack in group], details[:4])


def run_ended(facts: Facts) -> Match | None:
    """The latest run's record names the first cause of its end (docs/run-record.md, `ended`)."""
    if not facts.runs:
        return None
    path, record = max(facts.runs, key=lambda run: run[1].run_id)
    ended = record.ended
    if not ended.problem:
        return None
    where = [f"{name} {printable(str(value))}" for name in _PLACE if (value := getattr(ended, name)) is not None]
    message = printable(ended.message or "no message")
    line = Line(path, 0, f"ended: {printable(ended.how)}{': ' if where else ''}{', '.join(where)}")
    return Match([line], [message])


def watchdog_timeout(facts: Facts) -> Match | None:
    """Collectives that ran out of time, and the ranks that reported nothing: those are to be looked at first."""
    ranks = {t.rank for t in facts.timeouts if t.rank is not None} | {given_up.rank for given_up in facts.gave_up}
    details = []
    if facts.timeouts:
        first = min(facts.timeouts, key=lambda timeout: timeout.seq or 0)
        group = f"group {printable(first.group)}" if first.group is not None else "its group"
        number = f", number {first.seq} of {group}" if first.seq is not None else ""
        local = "" if first.in_job or first.rank is None else " (numbers in their group)"
        subject = f"{ranks_in_words(ranks)}{local} gave up; the first is" if ranks else "It is"
        details = [f"{subject} {first.kind}{number}."]
        if first.seq is not None and first.seq > 0:
            details.append(EARLY_HANG if first.seq <= EARLY else LATE_HANG.format(times=f"{first.seq - 1:,}"))
    elif facts.gave_up:
        seconds = max((given_up.seconds for given_up in facts.gave_up if given_up.seconds is not None), default=None)
        after = f" after {seconds:.0f} s" if seconds is not None else ""
        groups = ", ".join(sorted({printable(given_up.group) for given_up in facts.gave_up}))
        details = [
            f"{ranks_in_words(ranks)} gave up{after} in group {groups}; this backend does not say in which call."
        ]
    size = max((process.world_size or 0 for process in facts.processes), default=0)
    is_complete = bool(facts.gave_up) or all(timeout.in_job for timeout in facts.timeouts)
    if details and ranks and is_complete and (silent := set(range(size)) - ranks):
        details.append(f"{ranks_in_words(silent)} reported no timeout: look there first.")
    lines = [timeout.line for timeout in facts.timeouts] + [given_up.line for given_up in facts.gave_up]
    return Match(lines, details) if lines else None


def different_versions(facts: Facts) -> Match | None:
    by_version = {process.version: process for process in facts.of_one_job if process.version}
    if len(by_version) < 2:
        return None
    sentences = [f"{process.name} on {process.host} has NCCL {version}." for version, process in by_version.items()]
    return Match([process.lines["version"] for process in by_version.values()], sentences)
