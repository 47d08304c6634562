"""A comparison in plain words. It says only what the figures support."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ddp_lab.analysis.columns import COMPARISON_COLUMNS
from ddp_lab.analysis.comparison.compare import IS_REFERENCE, UNKNOWN, VERDICTS, Standing
from ddp_lab.analysis.comparison.fairness import MEMORY, TIME
from ddp_lab.analysis.errors import listed

FASTER, ALIKE, SLOWER = VERDICTS[-1], VERDICTS[0], VERDICTS[1]
WORTH_NAMING = 0.2
"""A part of a step is named as a reason if its difference is at least this share of the whole difference."""
DRIFT = "The choices ran one after the other, so a change of the machine between the runs would show here as well."
PARTS = {
    "exposed communication": ("exposed_wait_ms", "exposed_transfer_ms"),
    "compute": ("compute_ms",),
    "exposed memory copies": ("exposed_copy_ms",),
    "idle time": ("idle_ms",),
}
Row = dict[Any, Any]


def fastest(table: pd.DataFrame) -> str | None:
    """The choice with the lowest median step time; None if no step was timed."""
    timed = table.dropna(subset=["step_time_ms_median"])
    return str(timed.set_index("choice")["step_time_ms_median"].idxmin()) if len(timed) else None


def conclusion(table: pd.DataFrame, to_fastest: Mapping[str, Standing], affected: Sequence[str] = ()) -> str:
    """Which choice is fastest and why, and which needs least memory.

    Args:
        table: From `comparison`.
        to_fastest: The step times of the other choices, compared with the fastest.
        affected: Figures that cannot be compared, since the runs differ in other settings.
    """
    if len(table) == 1:
        return "Only one choice was run, so there is nothing to compare it with."
    is_timed = TIME not in affected
    sentences = speed(table, to_fastest) if is_timed else ["Step times cannot be compared here, so no choice wins."]
    if MEMORY not in affected:
        sentences += memory(table, to_fastest if is_timed else {})
    return " ".join(sentences)


def speed(table: pd.DataFrame, to_fastest: Mapping[str, Standing]) -> list[str]:
    """The fastest choice, compared with the reference. If it is the reference, it is compared with the next choice."""
    timed = table.dropna(subset=["step_time_ms_median"]).sort_values("step_time_ms_median", kind="stable")
    if len(timed) < 2:
        return ["Fewer than two choices have timed steps, so their speed cannot be compared."]
    ranked: list[Row] = list(timed.to_dict("records"))
    best, other = ranked[0], next((row for row in ranked[1:] if row["verdict"] == IS_REFERENCE), ranked[1])
    tied = [row["choice"] for row in ranked if shown(row, "step_time_ms_median") == shown(best, "step_time_ms_median")]
    if len(tied) > 1:
        return [f"{listed(tied)} tie for the lowest median step time, {shown(best, 'step_time_ms_median')} ms."]
    standing = to_fastest.get(other["choice"])
    sentences = against(best, other, standing)
    verdicts = {choice: found.verdict for choice, found in to_fastest.items() if choice != other["choice"]}
    if alike := [choice for choice, verdict in verdicts.items() if verdict == ALIKE]:
        sentences.append(f"{listed(alike)} cannot be told apart from it.")
    elif set(verdicts.values()) == {SLOWER}:
        sentences.append("All others are slower.")
    if (best["audit_failures"] or 0) > 0:
        sentences.append(f"But {best['choice']} fails its audit, so it may be fast because it does not do its work.")
    if standing is not None and standing.verdict != UNKNOWN:
        sentences.append(DRIFT)
    return sentences


def against(best: Row, other: Row, standing: Standing | None) -> list[str]:
    """How sure it is that `best` is faster than `other`, and why it is faster."""
    name, rival = called(best), called(other)
    verdict = standing.verdict if standing else UNKNOWN
    if other["verdict"] == IS_REFERENCE:  # the table compares the other way round
        verdict = {FASTER: SLOWER, SLOWER: FASTER}.get(best["verdict"], str(best["verdict"]))
    if standing is None or verdict == UNKNOWN:
        mine, theirs = (shown(row, "step_time_ms_median") for row in (best, other))
        few = "too few steps were timed in both to tell this from chance"
        return [
            f"{name} has the lowest median step time, {mine} ms against {other['choice']}'s {theirs} ms, but {few}."
        ]
    ratio = f"{standing.estimate.value:.2f} times its step time {interval(standing)}"
    if verdict == SLOWER:
        return [f"{name} is fastest here: {rival} takes {ratio}.", *why(best, other)]
    apart = "cannot be told apart from it" if verdict == ALIKE else "is faster step by step"
    return [f"{name} has the lowest median step time, but {rival} {apart}: {ratio}."]


def why(best: Row, other: Row) -> list[str]:
    """In which parts of the profiled steps `best` gains over `other`."""
    gains = {part: sum(other[column] - best[column] for column in columns) for part, columns in PARTS.items()}
    whole = other["profiled_step_ms"] - best["profiled_step_ms"]
    if pd.isna(whole):
        return ["Without traces of both, the reason is unknown."]
    if whole <= 0:
        return ["The profiled steps do not show why: under the profiler it is not faster."]
    notable = sorted(
        (part for part in gains if abs(gains[part]) >= WORTH_NAMING * whole), key=lambda part: -gains[part]
    )
    named = [f"{abs(gains[part]):,.1f} ms {'less' if gains[part] > 0 else 'more'} on {part}" for part in notable]
    return [f"In the profiled steps it spends {whole:,.1f} ms a step less than {other['choice']}: {listed(named)}."]


def memory(table: pd.DataFrame, to_fastest: Mapping[str, Standing]) -> list[str]:
    """Which choice needs least at the peak of a step, and what that costs in time.

    Args:
        to_fastest: Empty if step times cannot be compared.
    """
    known = table.dropna(subset=["peak_bytes"]).sort_values("step_time_ms_median", kind="stable")
    rows: list[Row] = list(known.to_dict("records"))
    if len(rows) < 2:
        return []
    least = shown(min(rows, key=lambda row: row["peak_bytes"]), "peak_bytes")
    lean = [row for row in rows if shown(row, "peak_bytes") == least]
    if len(lean) == len(rows):
        return [f"All need the same memory: {least} MiB at the peak of a step."]
    names = [row["choice"] for row in lean]
    needs = f"{listed(names)} {'needs' if len(names) == 1 else 'need'} least memory, {least} MiB at the peak of a step"
    best = next((row for row in rows if row["choice"] not in to_fastest), None) if to_fastest else None
    if best is None or best["choice"] in names:
        return [f"{needs}."]
    standing = to_fastest[names[0]]
    cost = {
        SLOWER: f"; {names[0]} takes {standing.estimate.value:.2f} times its step time {interval(standing)}",
        ALIKE: f"; the step time of {names[0]} cannot be told apart from it",
    }
    share = f"{lean[0]['peak_bytes'] / best['peak_bytes']:.2f} of what {best['choice']} needs"
    return [f"{needs}, {share}{cost.get(standing.verdict, '')}."]


def interval(standing: Standing) -> str:
    found = standing.estimate
    return f"(95 % interval {found.low:.2f} to {found.high:.2f}, {found.pairs} pairs of steps)"


def called(row: Row) -> str:
    return f"{row['choice']}, the reference," if row["verdict"] == IS_REFERENCE else str(row["choice"])


def shown(row: Row, column: str) -> str:
    return COMPARISON_COLUMNS[column].show(row[column])
