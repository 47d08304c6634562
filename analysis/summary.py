"""The summary of one window of one choice: a row a rank. `docs/csv-columns.md` explains each column."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.audit import audit
from analysis.collectives import KINDS
from analysis.errors import TraceError
from analysis.exposure import Exposure, exposure
from analysis.holistic import HolisticFigures, holistic_figures
from analysis.memory import memory_row
from analysis.timeline import RankTimeline, build_timeline
from analysis.traces import Window, read_trace, require_all_ranks
from training.config import RECORD_VERSION

KIND_SENTENCES = {
    "cpu": "CPU trace: operators of the training thread and Gloo spans, lowered to kernels on virtual streams.",
    "cuda": "GPU trace: device kernels as recorded.",
    "cuda over gloo": "GPU trace, collectives on Gloo's CPU threads: the device shows only compute and copies, "
    "so exposed communication, idle time and overlap are unknown.",
}


@dataclass(frozen=True)
class WindowAnalysis:
    """Everything that a report on one window shows.

    Attributes:
        summary: The table of `summary.csv`, a row a rank.
        audit: The table of `audit.csv`, a row a check; empty without a run record.
        record: The run record that belongs to the window; None for foreign traces.
    """

    window: Window
    timelines: list[RankTimeline]
    figures: HolisticFigures
    summary: pd.DataFrame
    audit: pd.DataFrame
    exposure: Exposure
    record: dict[str, Any] | None

    @property
    def kind_sentence(self) -> str:
        first = self.timelines[0]
        return KIND_SENTENCES["cuda over gloo" if hides_communication(first) else first.kind]


def analyse_window(
    window: Window,
    include_last_step: bool = False,
    multiprocessing: bool = False,
    on_rank: Callable[[int], None] = lambda rank: None,
) -> WindowAnalysis:
    """Read and analyse all ranks of a window.

    Args:
        on_rank: Called after each rank's trace is read, for a progress bar.

    Raises:
        TraceError: a trace is broken or missing, or the ranks' traces do not belong together.
    """
    timelines = []
    for rank, path in window.files.items():
        timelines.append(build_timeline(read_trace(path), rank, path, include_last_step))
        on_rank(rank)
    require_all_ranks(window, timelines[0].world_size)
    require_comparable(timelines)
    figures = holistic_figures(timelines, include_last_step, multiprocessing)
    record = find_record(window)
    rows = [{**summary_row(timeline, figures), **memory_row(record, timeline.rank)} for timeline in timelines]
    return WindowAnalysis(
        window, timelines, figures, pd.DataFrame(rows), audit(timelines, record), exposure(timelines), record
    )


def require_comparable(timelines: list[RankTimeline]) -> None:
    """Refuse ranks that saw different steps or different kinds of device.

    Raises:
        TraceError: names the file that differs.
    """
    first = timelines[0]
    for other in timelines[1:]:
        if other.steps["number"].tolist() != first.steps["number"].tolist():
            raise TraceError(
                f"{other.path}: has steps {other.steps['number'].tolist()}, but {first.path} has "
                f"{first.steps['number'].tolist()}; these are not of the same run or window"
            )
        if other.kind != first.kind:
            raise TraceError(f"{other.path} is a {other.kind} trace, but {first.path} is a {first.kind} trace")


def hides_communication(timeline: RankTimeline) -> bool:
    """Whether collectives ran, but none of them on the device that HTA looks at."""
    no_kernels = not (timeline.kernels["lane"] == "communication").any()
    return timeline.kind == "cuda" and no_kernels and len(timeline.collectives) > 0


def summary_row(timeline: RankTimeline, figures: HolisticFigures) -> dict[str, Any]:
    """The row of `summary.csv` for one rank. Times are of the profiled steps."""
    breakdown = figures.breakdown.set_index("rank").loc[timeline.rank]
    steps = len(timeline.steps)
    step_ms = (timeline.steps["end"] - timeline.steps["start"]).mean() / 1000
    unknown = (*PARTS[1:], "overlap") if hides_communication(timeline) else ()
    row = {
        "rank": timeline.rank,
        "world_size": timeline.world_size,
        "trace_kind": timeline.kind,
        "steps": steps,
        "profiled_step_ms": round(step_ms, 3),
        **{f"{part}_ms": round(breakdown[f"{part}_us"] / steps / 1000, 3) for part in PARTS},
        **{f"{part}_pct": round(100 * breakdown[f"{part}_us"] / breakdown["total_us"], 2) for part in PARTS},
        "overlap_pct": figures.overlap.set_index("rank").loc[timeline.rank, "overlap_pct"],
        "collective_calls_per_step": len(timeline.collectives) / steps,
        "collective_bytes_per_step": timeline.collectives["bytes"].sum(skipna=False) / steps,
        **collectives_by_kind(timeline.collectives, steps),
    }
    return {
        name: float("nan") if name.removesuffix("_ms").removesuffix("_pct") in unknown else value
        for name, value in row.items()
    }


PARTS = ("compute", "non_compute", "idle")


def collectives_by_kind(collectives: pd.DataFrame, steps: int) -> dict[str, float]:
    """Calls, payload and summed durations a step, of each of `KINDS`; a payload is NaN where a size is unknown."""
    kinds = collectives["kind"].where(collectives["kind"].isin(KINDS), "other")
    row = {}
    for kind in KINDS:
        calls = collectives[kinds == kind]
        row[f"{kind}_calls_per_step"] = len(calls) / steps
        row[f"{kind}_bytes_per_step"] = calls["bytes"].sum(skipna=False) / steps
        row[f"{kind}_ms_per_step"] = round((calls["end"] - calls["start"]).sum() / steps / 1000, 3)
    return row


def find_record(window: Window) -> dict[str, Any] | None:
    """The run record beside a window's rank folders, if there is one.

    Raises:
        TraceError: it is there but cannot be read.
    """
    path = next(iter(window.files.values())).parent.parent / f"{window.run_id}.run.json"
    return read_record(path) if path.exists() else None


def read_record(path: Path) -> dict[str, Any]:
    """The content of a run record.

    Raises:
        TraceError: it cannot be read, or is none.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read as a run record ({error})") from None
    if not isinstance(record, dict) or "run_id" not in record or "choice" not in record:
        raise TraceError(f"{path}: no run record (run_id and choice are missing)")
    if record.get("schema_version") != RECORD_VERSION:
        raise TraceError(
            f"{path}: a run record of version {record.get('schema_version')}, but this program reads version "
            f"{RECORD_VERSION}; train again"
        )
    return record


def write_text(path: Path, text: str) -> None:
    """Write `text` whole or not at all.

    Raises:
        TraceError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TraceError(f"cannot write {path}: {error.strerror}") from None
