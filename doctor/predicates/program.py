"""Ranks compared with each other: what they issued, how far they came, which versions they run."""

from collections import defaultdict

from doctor.comparison import evidence
from doctor.facts import Facts, Match, Progress
from doctor.reading.texts import Line, printable, ranks_in_words

_PLACE = ("rank", "step", "phase", "collective")


def different_collectives(facts: Facts) -> Match | None:
    """Ranks issued different collectives under one sequence number: by flight recorder, or by what timed out."""
    if found := _divergence(facts, "differ"):
        return found
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
    """A rank never issued a collective for which others wait: by flight recorder, or by the watchdog's counts."""
    if found := _divergence(facts, "behind"):
        return found
    by_group: dict[str, dict[int, Progress]] = defaultdict(dict)
    for progress in facts.progress:
        by_group[progress.group][progress.rank] = progress
    for of_rank in by_group.values():
        furthest = max(progress.enqueued for progress in of_rank.values())
        least = min(progress.enqueued for progress in of_rank.values())
        if furthest - least > 1:
            ranks = ranks_in_words(progress.rank for progress in of_rank.values() if progress.enqueued < furthest)
            sentence = f"{ranks} issued only {least} collectives, and others issued {furthest}."
            return Match([progress.line for progress in of_rank.values()], [sentence])
    return None


def rank_without_dump(facts: Facts) -> Match | None:
    """A rank left no flight record, and all others wait in a collective."""
    return _divergence(facts, "missing")


def stuck_together(facts: Facts) -> Match | None:
    """All ranks have issued a collective, and none has finished it."""
    return _divergence(facts, "stuck")


def _divergence(facts: Facts, what: str) -> Match | None:
    found = next((divergence for divergence in facts.divergences if divergence.what == what), None)
    return Match(evidence(found, facts.dumps), found.sentences) if found else None


def run_ended(facts: Facts) -> Match | None:
    """The latest run's record names the first cause of its end (docs/run-record.md, `ended`)."""
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


def watchdog_timeout(facts: Facts) -> Match | None:
    """Collectives that ran out of time, and the ranks that reported nothing: those are to be looked at first."""
    ranks = {timeout.rank for timeout in facts.timeouts} | {one.rank for one in facts.gave_up}
    if not ranks:
        return None
    size = max((process.world_size or 0 for process in facts.processes), default=0)
    gave_up = f"{ranks_in_words(ranks)} gave up"
    if facts.timeouts:
        first = min(facts.timeouts, key=lambda timeout: timeout.seq)
        details = [f"{gave_up}; the first is {first.kind}, number {first.seq} of its group."]
    else:
        seconds = max((one.seconds for one in facts.gave_up if one.seconds is not None), default=None)
        after = f" after {seconds:.0f} s" if seconds is not None else ""
        groups = ", ".join(sorted({printable(one.group) for one in facts.gave_up}))
        details = [f"{gave_up}{after} in group {groups}; this backend does not say in which collective."]
    if silent := set(range(size)) - ranks:
        details.append(f"{ranks_in_words(silent)} reported no timeout: look there first.")
    return Match([timeout.line for timeout in facts.timeouts] + [one.line for one in facts.gave_up], details)


def different_versions(facts: Facts) -> Match | None:
    by_version = {process.version: process for process in facts.processes if process.version}
    if len(by_version) < 2:
        return None
    sentences = [f"{process.name} on {process.host} has NCCL {version}." for version, process in by_version.items()]
    return Match([process.lines["version"] for process in by_version.values()], sentences)
