"""Ranks held against each other: what they issued, how far they came, which versions they run."""

from collections import defaultdict

from doctor.comparison import evidence
from doctor.facts import Facts, Progress
from doctor.predicates.match import Match
from doctor.texts import Line, printable, ranks_in_words

_PLACE = ("rank", "step", "phase", "collective")


def different_collectives(facts: Facts) -> Match | None:
    """Ranks issued different collectives under one sequence number: by flight recorder, or by what timed out."""
    for parting in facts.partings:
        if parting.what == "differ":
            return Match(evidence(parting, facts.dumps), parting.sentences)
    by_seq = defaultdict(list)
    for timeout in facts.timeouts:
        by_seq[timeout.seq].append(timeout)
    for seq, timeouts in sorted(by_seq.items()):
        by_call = {(timeout.kind, timeout.elements): timeout for timeout in timeouts}
        if len(by_call) > 1 and len({timeout.rank for timeout in by_call.values()}) > 1:
            calls = [f"rank {t.rank} {t.kind} of {t.elements[0] or 'unknown'} elements" for t in by_call.values()]
            return Match([t.line for t in by_call.values()], [f"Under sequence number {seq}: {', '.join(calls)}."])
    return None


def rank_behind(facts: Facts) -> Match | None:
    """A rank never issued what others wait for: by flight recorder, or by how far the watchdog saw its queue."""
    for parting in facts.partings:
        if parting.what == "behind":
            return Match(evidence(parting, facts.dumps), parting.sentences)
    by_group: dict[str, dict[int, Progress]] = defaultdict(dict)
    for progress in facts.progress:
        by_group[progress.group][progress.rank] = progress
    for of_rank in by_group.values():
        furthest = max(progress.enqueued for progress in of_rank.values())
        behind = [progress for progress in of_rank.values() if progress.enqueued < furthest]
        if behind and furthest - min(p.enqueued for p in behind) > 1:
            ranks = ranks_in_words(progress.rank for progress in behind)
            least = min(behind, key=lambda progress: progress.enqueued)
            sentence = f"{ranks} issued only {least.enqueued} collectives where others issued {furthest}."
            return Match([progress.line for progress in of_rank.values()], [sentence])
    return None


def rank_without_dump(facts: Facts) -> Match | None:
    for parting in facts.partings:
        if parting.what == "missing":
            return Match(evidence(parting, facts.dumps), parting.sentences)
    return None


def run_ended(facts: Facts) -> Match | None:
    """The latest run's own record names the first cause of its end (docs/run-record.md, `ended`)."""
    if not facts.runs:
        return None
    path, record = max(facts.runs, key=lambda run: str(run[1]["run_id"]))
    ended = record.get("ended")
    if not isinstance(ended, dict) or ended.get("how") in (None, "completed"):
        return None
    where = [f"{name} {printable(str(ended[name]))}" for name in _PLACE if ended.get(name) is not None]
    said = printable(str(ended.get("message") or "no message"))
    line = Line(path, 0, f"ended: {printable(str(ended['how']))}{': ' if where else ''}{', '.join(where)}")
    return Match([line], [said])


def stuck_together(facts: Facts) -> Match | None:
    for parting in facts.partings:
        if parting.what == "stuck":
            return Match(evidence(parting, facts.dumps), parting.sentences)
    return None


def watchdog_timeout(facts: Facts) -> Match | None:
    """Collectives that ran out of time, and which ranks said nothing: those are to be looked at first."""
    if not facts.timeouts:
        return None
    details = []
    ranks = {timeout.rank for timeout in facts.timeouts}
    size = max((process.world_size or 0 for process in facts.processes), default=0)
    first = min(facts.timeouts, key=lambda timeout: timeout.seq)
    details.append(f"{ranks_in_words(ranks)} gave up; the first is {first.kind}, number {first.seq} of its group.")
    if silent := set(range(size)) - ranks:
        details.append(f"{ranks_in_words(silent)} reported no timeout: look there first.")
    return Match([timeout.line for timeout in facts.timeouts], details)


def different_versions(facts: Facts) -> Match | None:
    by_version = {process.version: process for process in facts.processes if process.version}
    if len(by_version) < 2:
        return None
    sentences = [f"{process.name} on {process.host} has NCCL {version}." for version, process in by_version.items()]
    return Match([process.lines["version"] for process in by_version.values()], sentences)
