"""A comparison in plain words. It says only what the figures support."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from ddp_lab.analysis.columns import COMPARISON_COLUMNS
from ddp_lab.analysis.comparison.compare import IS_REFERENCE, UNKNOWN, VERDICTS, Standing
from ddp_lab.analysis.comparison.fairness import TIME
from ddp_lab.analysis.metrics.significance import FEWEST_STEPS, Estimate, runs_needed
from ddp_lab.runtime.errors import listed

FASTER, SLOWER = VERDICTS[-1], VERDICTS[1]
WORTH_NAMING = 0.2
"""A part of a step is named as a reason if its difference is at least this share of the whole difference."""
SAME_MEMORY = 0.01
"""Choices whose peaks differ by a smaller share need the same."""
PARTS = {
    "compute": ("compute_ms",),
    "exposed communication": ("exposed_wait_ms", "exposed_transfer_ms"),
    "exposed memory copies": ("exposed_copy_ms",),
    "idle time": ("idle_ms",),
}
Row = dict[Any, Any]


class Verdict(NamedTuple):
    """Two sentences.

    Attributes:
        claim: Which choice won, by how much, and why.
        belief: Whether to believe that, and for what reasons; empty if nobody won.
        is_sure: Whether a reader may act on it.
    """

    claim: str
    belief: str = ""
    is_sure: bool = False


def fastest(table: pd.DataFrame) -> str | None:
    """The choice with the lowest median step time; None if no step was timed."""
    timed = table.dropna(subset=["step_time_ms_median"])
    return str(timed.set_index("choice")["step_time_ms_median"].idxmin()) if len(timed) else None


def parts_of(row: Row) -> dict[str, float]:
    """The median step in ms by `PARTS`, in the shares of the profiled steps, which take longer; NaN without traces."""
    scale = row["step_time_ms_median"] / row["profiled_step_ms"]
    return {part: scale * sum(row[column] for column in columns) for part, columns in PARTS.items()}


def verdict(
    table: pd.DataFrame,
    to_fastest: Mapping[str, Standing],
    affected: Sequence[str] = (),
    equal_compute: bool = False,
) -> Verdict:
    """The fastest choice against the reference, or against the next choice if it is the reference itself.

    Args:
        table: From `comparison`.
        to_fastest: The step times of the other choices, compared with the fastest.
        affected: Figures that cannot be compared, since the runs differ in other settings.
        equal_compute: All choices do equal compute, so that a difference in it is no merit of theirs.
    """
    if len(table) == 1:
        return Verdict("Only one choice was run, so there is nothing to compare it with.")
    if TIME in affected:
        return Verdict("Step times cannot be compared here, so no choice wins.")
    timed = table.dropna(subset=["step_time_ms_median"]).sort_values("step_time_ms_median", kind="stable")
    if len(timed) < 2:
        return Verdict("Fewer than two choices have timed steps, so their speed cannot be compared.")
    ranked: list[Row] = list(timed.to_dict("records"))
    best, other = ranked[0], next((row for row in ranked[1:] if row["verdict"] == IS_REFERENCE), ranked[1])
    mine, theirs = (shown(row, "step_time_ms_median") for row in (best, other))
    tied = [row["choice"] for row in ranked if shown(row, "step_time_ms_median") == mine]
    if len(tied) > 1:
        return Verdict(f"No choice wins: {listed(tied)} tie for the lowest median step time, {mine} ms.")
    standing = to_fastest.get(other["choice"])
    rival = f"the reference {other['choice']}" if other["verdict"] == IS_REFERENCE else other["choice"]
    if standing is None or not standing.by_pass:
        return Verdict(
            f"Too few steps to name a winner: so far {best['choice']} has the lowest median step time, {mine} ms "
            f"against {theirs} ms of {other['choice']}.",
            f"A comparison takes {FEWEST_STEPS} timed steps of both in one pass: run all choices with more steps "
            "(--max-steps).",
        )
    found, passes = standing.estimate, len(standing.by_pass)
    judged = standing.verdict
    if other["verdict"] == IS_REFERENCE:  # the table compares the other way round
        judged = {FASTER: SLOWER, SLOWER: FASTER}.get(best["verdict"], UNKNOWN)
    measured = (
        f"over {passes} pass{'es' * (passes > 1)}, a step of {best['choice']} takes {1 / found.high:.2f} to "
        f"{1 / found.low:.2f} of one of {other['choice']} (95 % interval)"
    )
    if judged != SLOWER:
        known = "cannot be told apart from it" if judged == UNKNOWN else "is faster step by step"
        doubt = "The difference may be chance" if judged == UNKNOWN else "Medians mislead here"
        return Verdict(
            f"No choice wins: {best['choice']} has the lowest median step time, {mine} ms, but {rival} {known}.",
            f"{doubt}: {measured}. {what_would_tell(found, passes)}",
        )
    alike = [name for name, each in to_fastest.items() if each.verdict == UNKNOWN and name != other["choice"]]
    who = f"{best['choice']} is fastest"
    if alike:
        who = f"{listed([best['choice'], *alike])} are fastest (they cannot be told apart)"
    claim = (
        f"{who}, {found.value:.2f} times as fast as {rival}, step by step (medians: {mine} and {theirs} ms)"
        f"{reason(best, other, equal_compute)}."
    )
    if (best["audit_failures"] or 0) > 0:
        return Verdict(
            claim, f"Doubt it: {best['choice']} fails its audit, so it may be fast because it does too little."
        )
    evidence = listed([measured, *checks(table)])
    return Verdict(claim, f"Believe it: {evidence}.", True)


def what_would_tell(ratio: Estimate, passes: int) -> str:
    """How many passes would show a difference of this size."""
    needed = runs_needed(ratio, passes)
    if needed is None:
        return "More than 20 passes would be needed to tell so small a difference."
    return f"About {needed} passes would tell: run again with --passes {needed}."


def reason(best: Row, other: Row, equal_compute: bool) -> str:
    """In which parts of a step `best` gains over `other`, as the rest of a sentence; not in equal compute."""
    if pd.isna(whole := other["profiled_step_ms"] - best["profiled_step_ms"]):
        return "; without traces of both, it is unknown why"
    mine, theirs = parts_of(best), parts_of(other)
    gains = {part: theirs[part] - mine[part] for part in PARTS if not (equal_compute and part == "compute")}
    notable = sorted(gains, key=lambda part: -abs(gains[part]))
    notable = [part for part in notable if abs(gains[part]) >= WORTH_NAMING * sum(gains.values())]
    less = [f"{gains[part]:,.1f} ms less {part}" for part in notable if gains[part] > 0]
    more = [f"{-gains[part]:,.1f} ms more {part}" for part in notable if gains[part] < 0]
    if whole <= 0 or not less:
        return "; the profiled steps do not show why"
    return f", thanks to {listed(less)}{f' and despite {listed(more)}' if more else ''}"


def checks(table: pd.DataFrame) -> list[str]:
    """What else speaks for the figures."""
    audited, apart = table["audit_failures"].dropna(), table["loss_difference"].max()
    unit = f" {table.attrs['loss_unit']}".rstrip()
    found = [] if pd.isna(apart) else [f"losses are at most {apart:.1g}{unit} apart"]
    return found + ["every audit passes"] * (len(audited) > 0 and not audited.any())


def leanest(table: pd.DataFrame, to_fastest: Mapping[str, Standing]) -> str:
    """Which choice needs least at the peak of a step, and what that costs in time; empty if fewer than two are known.

    Args:
        to_fastest: Empty if step times cannot be compared.
    """
    known = table.dropna(subset=["peak_bytes"]).sort_values("step_time_ms_median", kind="stable")
    rows: list[Row] = list(known.to_dict("records"))
    if len(rows) < 2:
        return ""
    least = min(row["peak_bytes"] for row in rows)
    size = f"{least / 2**20:,.1f} MiB" if least >= 2**20 / 10 else f"{least / 2**10:,.1f} KiB"
    lean = [row for row in rows if row["peak_bytes"] <= least * (1 + SAME_MEMORY)]
    if len(lean) == len(rows):
        return f"All need the same memory, to {SAME_MEMORY:.0%}: {size} at the peak of a step."
    names = [row["choice"] for row in lean]
    needs = f"Least peak memory: {size} ({', '.join(names)})"
    best = next((row for row in rows if row["choice"] not in to_fastest), None) if to_fastest else None
    if best is None or best["choice"] in names:
        return f"{needs}."
    standing = to_fastest[names[0]]
    quickest = names[0] if len(names) == 1 else f"{names[0]}, the fastest of these,"
    cost = {
        SLOWER: f"; {quickest} takes {standing.estimate.value:.2f} times as long",
        UNKNOWN: f"; the step time of {quickest} cannot be told apart from it",
    }
    less = f"{100 * (1 - least / best['peak_bytes']):.0f} % less than {best['choice']}"
    return f"{needs}, {less}{cost.get(standing.verdict, '')}."


def shown(row: Row, column: str) -> str:
    return COMPARISON_COLUMNS[column].show(row[column])
