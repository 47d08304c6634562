"""Which choice to take, and why: from the rows of the table, in sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30
AS_FAST = 0.02
"""Choices that take no more than this share longer than the fastest are as fast: errors are mostly common to both."""
AMPLE = 0.8
"""Of the usable memory: a peak below this share of it leaves room, so a smaller one is no reason for more parts."""
TIGHT = 0.1
"""Of the same: less than this to spare deserves a word."""
Row = Mapping[str, Any]


def recommended(rows: Sequence[Row]) -> Row | None:
    """Of the choices that fit, the fastest. Of several as fast, the simplest of those that leave ample room, which is
    the first in the order of the registries; where none does, that with the smallest peak. None if none fits.
    """
    equal = as_fast(rows)
    roomy = [row for row in equal if is_roomy(row)]
    return roomy[0] if roomy else min(equal, key=lambda row: row["peak_bytes"], default=None)


def contenders(rows: Sequence[Row]) -> list[str]:
    """Of the choices that could be simulated: the recommended one, the fastest, and that with the smallest peak."""
    known = [row for row in rows if row["fits"] != "unknown"]
    best = recommended(rows)
    if not known:
        return []
    ends = [min(known, key=lambda row: row[column]) for column in ("step_time_ms", "peak_bytes")]
    return list(dict.fromkeys(row["choice"] for row in (best, *ends) if row))


def is_roomy(row: Row) -> bool:
    return bool(row["peak_bytes"] <= AMPLE * (row["peak_bytes"] + row["spare_bytes"]))


def as_fast(rows: Sequence[Row]) -> list[Row]:
    """Of those that fit, the fastest and those that are as fast."""
    fitting = [row for row in rows if row["fits"] == "yes"]
    limit = min((row["step_time_ms"] for row in fitting), default=0.0) * (1 + AS_FAST)
    return [row for row in fitting if row["step_time_ms"] <= limit]


def reasons(rows: Sequence[Row]) -> list[str]:
    """Sentences that say which choice to take and why, or what is missing."""
    known = [row for row in rows if row["fits"] != "unknown"]
    if not known:
        return ["No choice could be simulated, so there is nothing to recommend."]
    best = recommended(rows)
    if best is None:
        leanest = min(known, key=lambda row: row["peak_bytes"])
        return [
            f"No choice fits. {leanest['choice']} comes nearest: its peak of {gib(leanest['peak_bytes'])} is "
            f"{gib(-leanest['spare_bytes'])} more than a device has left for tensors."
        ]
    sentences = [
        f"Take {best['choice']} ({best['entrypoint']} --ddp-choice {best['choice']}): {best['step_time_ms']:,.1f} ms a "
        f"step ({best['step_time_low_ms']:,.1f} to {best['step_time_high_ms']:,.1f}), "
        f"{best['samples_per_second']:,.1f} samples/s; its peak of {gib(best['peak_bytes'])} leaves "
        f"{gib(best['spare_bytes'])} to spare."
    ]
    others = [row for row in known if row is not best]
    equal = as_fast(rows)
    slower = [row for row in others if row["fits"] == "yes" and row not in equal]
    sentences += (
        tight(best, rows) + against_equal(best, equal) + against_slower(best, slower) + against_leaner(best, others)
    )
    too_large = [row for row in others if row["fits"] == "no"]
    if too_large:
        nearest = min(too_large, key=lambda row: row["peak_bytes"])
        sentences.append(
            f"Not on these devices: {listed(row['choice'] for row in too_large)}; of them {nearest['choice']} comes "
            f"nearest, short of {gib(-nearest['spare_bytes'])}."
        )
    return sentences


def tight(best: Row, rows: Sequence[Row]) -> list[str]:
    """A word of caution where little is left, and what leaves more."""
    roomy = [row for row in rows if row["fits"] == "yes" and is_roomy(row)]
    if best["spare_bytes"] >= TIGHT * (best["peak_bytes"] + best["spare_bytes"]):
        return []
    caution = "That is little, since what the allocator keeps unused is not in the peak"
    if not roomy:
        return [f"{caution}."]
    safer = min(roomy, key=lambda row: row["step_time_ms"])
    return [f"{caution}; with more room the fastest is {safer['choice']}, {safer['step_time_ms']:,.1f} ms a step."]


def against_equal(best: Row, equal: Sequence[Row]) -> list[str]:
    others = [row["choice"] for row in equal if row is not best]
    if not others:
        return []
    why = (
        "there is ample room, and it is the simplest of them" if is_roomy(best) else "its peak is the smallest of them"
    )
    return [f"As fast within {AS_FAST:.0%}: {listed(others)}; {best['choice']} is taken since {why}."]


def against_slower(best: Row, slower: Sequence[Row]) -> list[str]:
    """The next one in speed, and what it loses its time with."""
    if not slower:
        return []
    second = min(slower, key=lambda row: row["step_time_ms"])
    last = max(slower, key=lambda row: row["step_time_ms"])
    difference = second["step_time_ms"] - best["step_time_ms"]
    exposed = second["exposed_ms"] - best["exposed_ms"]
    why = f", with {exposed:,.1f} ms more of exposed communication" if exposed > difference / 2 else ""
    sentence = f"Next in speed is {second['choice']}, {difference:,.1f} ms a step slower{why}"
    if last is not second:
        sentence += (
            f"; the slowest is {last['choice']}, {last['step_time_ms'] / best['step_time_ms']:.2f} times the time"
        )
    return [sentence + "."]


def against_leaner(best: Row, others: Sequence[Row]) -> list[str]:
    """What less memory would cost."""
    leaner = [row for row in others if row["peak_bytes"] < 0.95 * best["peak_bytes"]]
    if not leaner:
        return []
    leanest = min(leaner, key=lambda row: row["peak_bytes"])
    return [
        f"For larger batches or models, {leanest['choice']} has the smallest peak: {gib(leanest['peak_bytes'])}, at "
        f"{leanest['step_time_ms'] / best['step_time_ms']:.2f} times the step time."
    ]


def gib(held: float) -> str:
    return f"{held / GIB:,.2f} GiB"


def listed(names: Any) -> str:
    names = list(names)
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
