"""What a comparison concludes. It says only what the figures support; `sentences.j2` has the words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pandas as pd

from ddp_lab.analysis.columns import COMPARISON_COLUMNS, SCHEMA_VERSION
from ddp_lab.analysis.comparison.compare import IS_REFERENCE, UNKNOWN, VERDICTS, Standing
from ddp_lab.analysis.comparison.fairness import TIME
from ddp_lab.analysis.metrics.significance import FEWEST_STEPS, Estimate, runs_needed
from ddp_lab.analysis.sentences import say
from ddp_lab.runtime.settings.field import MEMORY

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
NOT_ESTIMATED = Estimate()


@dataclass(frozen=True)
class Lean:
    """The choices with the lowest peak memory in a step, and how the first of them compares with the fastest choice.

    Attributes:
        names: The choices, in order of step time.
        bytes: Their peak. `is_all`: no choice needs more.
        beside: The fastest choice, if it needs more; else empty. `saved`: the share of its memory that they save.
        verdict: On the step time of the first of `names` beside the fastest choice; `ratio` is of these step times.
    """

    names: list[str]
    bytes: float
    is_all: bool
    beside: str = ""
    saved: float = 0.0
    verdict: str = ""
    ratio: Estimate = NOT_ESTIMATED
    tolerance: float = SAME_MEMORY


@dataclass(frozen=True)
class Outcome:
    """Who won among runs that are compared with each other.

    Attributes:
        kind: `wins`, or why nobody does: `alone`, `apart` (step times cannot be compared), `untimed`, `tie`, `few`
            (steps), `chance`, `medians` (they mislead); `doubted`: the winner fails its audit.
        lean: Who needs least memory; None if that is not known.
        over: Which runs, if there are several groups of them.
        best: Row of the choice with the lowest median step time.
        second: Row of the reference, or of the next choice if the best one is the reference.
        names: Choices that tie; or the winner, and those that cannot be told apart from it.
        ratio: The second's step time over the best's. `passes`: how many passes it is from.
        gains: ms by which each part of a step is shorter, the largest first, without small ones; empty if the traces
            do not show why the best is faster, None without traces.
        losses_apart: The largest difference of losses; NaN if it is unknown.
        all_audited: There are audits, and all pass.
    """

    kind: str
    lean: Lean | None = None
    over: str = ""
    best: Row | None = None
    second: Row | None = None
    names: Sequence[str] = ()
    ratio: Estimate = NOT_ESTIMATED
    passes: int = 0
    gains: Mapping[str, float] | None = None
    losses_apart: float = float("nan")
    loss_unit: str = ""
    all_audited: bool = False
    fewest_steps: int = FEWEST_STEPS

    @property
    def is_reference(self) -> bool:
        """Whether `second` is the reference."""
        return self.second is not None and self.second["verdict"] == IS_REFERENCE

    @property
    def runs_needed(self) -> int | None:
        """How many passes would show a difference of this size; None if too many."""
        return runs_needed(self.ratio, self.passes)

    @property
    def is_sure(self) -> bool:
        """Whether a reader may act on it."""
        return self.kind == "wins"

    @property
    def claim(self) -> str:
        """Who won, by how much, and why."""
        return say("claim", self)

    @property
    def belief(self) -> str:
        """Whether to believe the claim, why, and what would tell more; empty if nothing is claimed."""
        return say("belief", self)

    @property
    def memory(self) -> str:
        """Who needs least memory, and what that costs in time; empty if it is not known."""
        return say("leanest", self)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.claim, self.belief, self.memory)))


def as_json(outcomes: Sequence[Outcome]) -> str:
    """The content of `compare.json`; figures that are not known are null."""
    texts = ("kind", "over", "is_sure", "names", "passes", "runs_needed", "claim", "belief", "memory")
    rows = [
        {name: getattr(outcome, name) for name in texts}
        | {name: row and row["choice"] for name, row in (("best", outcome.best), ("second", outcome.second))}
        | {"ratio": outcome.ratio._asdict(), "leanest": outcome.lean and outcome.lean.names}
        for outcome in outcomes
    ]
    return msgspec.json.encode({"schema_version": SCHEMA_VERSION, "outcomes": rows}, enc_hook=float).decode()


def fastest(table: pd.DataFrame) -> str | None:
    """The choice with the lowest median step time; None if no step was timed."""
    timed = table.dropna(subset=["step_time_ms_median"])
    return str(timed.set_index("choice")["step_time_ms_median"].idxmin()) if len(timed) else None


def parts_of(row: Row) -> dict[str, float]:
    """The median step in ms by `PARTS`. Profiled steps, which take longer, give the shares; NaN without traces."""
    scale = row["step_time_ms_median"] / row["profiled_step_ms"]
    return {part: scale * sum(row[column] for column in columns) for part, columns in PARTS.items()}


def conclude(
    table: pd.DataFrame,
    to_fastest: Mapping[str, Standing],
    affected: Sequence[str] = (),
    equal_compute: bool = False,
    over: str = "",
) -> Outcome:
    """The fastest choice against the reference, or against the next choice if it is the reference itself.

    Args:
        table: From `comparison`.
        to_fastest: The step times of the other choices, compared with the fastest.
        affected: Figures that cannot be compared, since the runs differ in other settings.
        equal_compute: All choices do equal compute, so no choice gets credit for less of it.
        over: Which of several groups of runs these are.
    """
    # is there something to compare?
    lean = None if MEMORY in affected else leanest(table, {} if TIME in affected else to_fastest)
    timed = table.dropna(subset=["step_time_ms_median"]).sort_values("step_time_ms_median", kind="stable")
    if len(table) == 1 or TIME in affected or len(timed) < 2:
        return Outcome("alone" if len(table) == 1 else "apart" if TIME in affected else "untimed", lean, over)
    # the best choice, and the second, with which it is compared
    ranked: list[Row] = list(timed.to_dict("records"))
    best, second = ranked[0], next((row for row in ranked[1:] if row["verdict"] == IS_REFERENCE), ranked[1])
    tied = [row["choice"] for row in ranked if shown(row, "step_time_ms_median") == shown(best, "step_time_ms_median")]
    if len(tied) > 1:
        return Outcome("tie", lean, over, best, names=tied)
    # how sure is it that the best is faster?
    standing = to_fastest.get(second["choice"])
    if standing is None or not standing.by_pass:
        return Outcome("few", lean, over, best, second)
    # the table compares with the reference, `to_fastest` with the best
    against = {FASTER: SLOWER, SLOWER: FASTER}
    judged = against.get(best["verdict"], UNKNOWN) if second["verdict"] == IS_REFERENCE else standing.verdict
    kind = {UNKNOWN: "chance", FASTER: "medians"}.get(
        judged, "doubted" if (best["audit_failures"] or 0) > 0 else "wins"
    )
    audited = table["audit_failures"].dropna()
    close = (name for name, result in to_fastest.items() if result.verdict == UNKNOWN and name != second["choice"])
    return Outcome(
        kind,
        lean,
        over,
        best,
        second,
        [best["choice"], *close],
        standing.estimate,
        len(standing.by_pass),
        gains(best, second, equal_compute),
        table["loss_difference"].max(),
        table.attrs["loss_unit"],
        len(audited) > 0 and not audited.any(),
    )


def gains(best: Row, second: Row, equal_compute: bool) -> dict[str, float] | None:
    """`Outcome.gains`, without compute if all choices do equal compute."""
    if pd.isna(step_saved := second["profiled_step_ms"] - best["profiled_step_ms"]):
        return None
    faster, slower = parts_of(best), parts_of(second)
    saved = {part: slower[part] - faster[part] for part in PARTS if not (equal_compute and part == "compute")}
    largest = sorted(saved, key=lambda part: -abs(saved[part]))
    notable = {part: saved[part] for part in largest if abs(saved[part]) >= WORTH_NAMING * sum(saved.values())}
    return notable if step_saved > 0 and max(notable.values(), default=0.0) > 0 else {}


def leanest(table: pd.DataFrame, to_fastest: Mapping[str, Standing]) -> Lean | None:
    """Who needs least memory; None if fewer than two peaks are known. `to_fastest`: empty if times are not compared."""
    rows = table.dropna(subset=["peak_bytes"]).sort_values("step_time_ms_median", kind="stable")
    peaks: dict[str, float] = dict(zip(rows["choice"], rows["peak_bytes"], strict=True))
    if len(peaks) < 2:
        return None
    least = min(peaks.values())
    names = [name for name, peak in peaks.items() if peak <= least * (1 + SAME_MEMORY)]
    best = next((name for name in peaks if to_fastest and name not in to_fastest), None)
    if best is None or best in names:
        return Lean(names, least, len(names) == len(peaks))
    standing = to_fastest[names[0]]
    return Lean(names, least, False, best, 1 - least / peaks[best], standing.verdict, standing.estimate)


def shown(row: Row, column: str) -> str:
    return COMPARISON_COLUMNS[column].show(row[column])
