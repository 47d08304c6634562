"""What a comparison says in plain words: only what its figures support."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.columns import COMPARISON_COLUMNS
from analysis.comparison.compare import IS_REFERENCE, UNKNOWN, VERDICTS, Standing
from analysis.comparison.fairness import MEMORY, TIME
from analysis.wording import listed

FASTER, ALIKE, SLOWER = VERDICTS[-1], VERDICTS[0], VERDICTS[1]
WORTH_NAMING = 0.2
"""A part of a step is named among the reasons where its difference is at least this share of the whole difference."""
DRIFT = "The choices ran one after the other, so a machine that changed between them would show in this as well."
Row = dict[Any, Any]


def fastest(table: pd.DataFrame) -> str | None:
    """The choice with the lowest median step time; None where none was timed."""
    timed = table.dropna(subset=["step_time_ms_median"])
    return str(timed.set_index("choice")["step_time_ms_median"].idxmin()) if len(timed) else None


def conclusion(table: pd.DataFrame, to_fastest: Mapping[str, Standing], bent: Sequence[str] = ()) -> str:
    """Which choice is fastest and why, and which needs least memory.

    Args:
        table: As `comparison` makes it.
        to_fastest: How the others' step times stand to those of the fastest.
        bent: Figures that do not compare, since the runs differ in what bends them.
    """
    if len(table) == 1:
        return "Only one choice was run, so there is nothing to compare it with."
    sentences = speed(table, to_fastest) if TIME not in bent else ["Step times do not compare here, so no choice wins."]
    if MEMORY not in bent:
        sentences += memory(table, to_fastest if TIME not in bent else {})
    return " ".join(sentences)


def speed(table: pd.DataFrame, to_fastest: Mapping[str, Standing]) -> list[str]:
    """The fastest choice, held against the reference, or where it is the reference itself, against the next."""
    timed = table.dropna(subset=["step_time_ms_median"]).sort_values("step_time_ms_median", kind="stable")
    if len(timed) < 2:
        return ["Fewer than two choices have steps that were timed, so nothing can be said of speed."]
    ranked: list[Row] = list(timed.to_dict("records"))
    best, other = ranked[0], next((row for row in ranked[1:] if row["verdict"] == IS_REFERENCE), ranked[1])
    tied = [row["choice"] for row in ranked if shown(row, "step_time_ms_median") == shown(best, "step_time_ms_median")]
    if len(tied) > 1:
        return [f"{listed(tied)} tie for the lowest median step time, {shown(best, 'step_time_ms_median')} ms."]
    standing = to_fastest.get(other["choice"])
    sentences = [*against(best, other, standing), *others(to_fastest, other["choice"])]
    if (best["audit_failures"] or 0) > 0:
        sentences.append(f"But {best['choice']} fails its audit, so it may be fast for not doing its work.")
    if standing is not None and standing.verdict != UNKNOWN:
        sentences.append(DRIFT)
    return sentences


def against(best: Row, other: Row, standing: Standing | None) -> list[str]:
    """How sure it is that `best` is faster than `other`, and why it is if it is."""
    name, rival = called(best), called(other)
    verdict = standing.verdict if standing else UNKNOWN
    if other["verdict"] == IS_REFERENCE:  # the table has said it, from the other side
        verdict = {FASTER: SLOWER, SLOWER: FASTER}.get(best["verdict"], str(best["verdict"]))
    if standing is None or verdict == UNKNOWN:
        mine, theirs = (shown(row, "step_time_ms_median") for row in (best, other))
        few = "too few steps were timed in both to say whether that is more than chance"
        return [
            f"{name} has the lowest median step time, {mine} ms against {other['choice']}'s {theirs} ms, but {few}."
        ]
    ratio = f"{standing.estimate.value:.2f} times its step time {sure(standing)}"
    if verdict == SLOWER:
        return [f"{name} is fastest here: {rival} takes {ratio}.", *why(best, other)]
    apart = "cannot be told apart from it" if verdict == ALIKE else "is faster step by step"
    return [f"{name} has the lowest median step time, but {rival} {apart}: {ratio}."]


def why(best: Row, other: Row) -> list[str]:
    """In which part of the profiled steps `best` gains over `other`, and what each sends; nothing without traces."""
    parts = {
        "exposed communication": ("exposed_wait_ms", "exposed_transfer_ms"),
        "compute": ("compute_ms",),
        "exposed memory copies": ("exposed_copy_ms",),
        "idle time": ("idle_ms",),
    }
    gains = {part: sum(other[column] - best[column] for column in columns) for part, columns in parts.items()}
    whole = other["profiled_step_ms"] - best["profiled_step_ms"]
    if pd.isna(whole):
        return ["Without traces of both, nothing says why."]
    if whole <= 0:
        return ["The profiled steps do not show why: under the profiler it is not the faster one."]
    notable = sorted(
        (part for part in gains if abs(gains[part]) >= WORTH_NAMING * whole), key=lambda part: -gains[part]
    )
    named = [f"{abs(gains[part]):,.1f} ms {'less' if gains[part] > 0 else 'more'} on {part}" for part in notable]
    spent = f"In the profiled steps it spends {whole:,.1f} ms a step less than {other['choice']}: {listed(named)}."
    mine, theirs = (sent(row) for row in (best, other))
    if mine == theirs:
        return [spent, f"Both make {mine}."]
    return [spent, f"It makes {mine}; {other['choice']} makes {theirs}."]


def sent(row: Row) -> str:
    """Calls, and payload where it is known."""
    calls = f"{row['collective_calls_per_step']:,.0f} collective calls a step"
    known = not pd.isna(row["collective_bytes_per_step"])
    return calls + (f" with {shown(row, 'collective_bytes_per_step')} MiB" if known else "")


def others(to_fastest: Mapping[str, Standing], named: str) -> list[str]:
    """How the choices other than `named` stand to the fastest."""
    verdicts = {choice: standing.verdict for choice, standing in to_fastest.items() if choice != named}
    alike = [choice for choice, verdict in verdicts.items() if verdict == ALIKE]
    if alike:
        return [f"{listed(alike)} cannot be told apart from it."]
    return ["All others are slower."] if verdicts and set(verdicts.values()) == {SLOWER} else []


def memory(table: pd.DataFrame, to_fastest: Mapping[str, Standing]) -> list[str]:
    """Which choice needs least at the peak of a step, and what that costs in time.

    Args:
        to_fastest: None of them where step times do not compare.
    """
    known = table.dropna(subset=["peak_bytes"])
    if len(known) < 2:
        return []
    rows: list[Row] = list(known.sort_values("step_time_ms_median", kind="stable").to_dict("records"))
    least = shown(min(rows, key=lambda row: row["peak_bytes"]), "peak_bytes")
    lean = [row for row in rows if shown(row, "peak_bytes") == least]
    if len(lean) == len(rows):
        return [f"All need the same memory: {least} MiB at the peak of a step."]
    names = [row["choice"] for row in lean]
    needs = f"{listed(names)} {'needs' if len(names) == 1 else 'need'} least memory, {least} MiB at the peak of a step"
    best = next((row for row in rows if row["choice"] not in to_fastest), None) if to_fastest else None
    if best is None:
        return [f"{needs}."]
    if best["choice"] in names:
        return [f"{needs}." if len(names) > 1 else f"It also needs least memory, {least} MiB at the peak of a step."]
    share = f"{lean[0]['peak_bytes'] / best['peak_bytes']:.2f} of what {best['choice']} needs"
    standing = to_fastest[names[0]]
    subject = "it" if len(names) == 1 else f"{names[0]}, the fastest of them,"
    cost = {
        SLOWER: f"; {subject} takes {standing.estimate.value:.2f} times its step time {sure(standing)}",
        ALIKE: f"; in step time {subject.rstrip(',')} cannot be told apart from it",
    }
    return [f"{needs}, {share}{cost.get(standing.verdict, '')}."]


def sure(standing: Standing) -> str:
    found = standing.estimate
    return f"(95 % interval {found.low:.2f} to {found.high:.2f}, {found.pairs} pairs of steps)"


def called(row: Row) -> str:
    return f"{row['choice']}, the reference," if row["verdict"] == IS_REFERENCE else str(row["choice"])


def shown(row: Row, column: str) -> str:
    return COMPARISON_COLUMNS[column].show(row[column])
