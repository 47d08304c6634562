"""The summary of one window of one choice: a row a rank. `docs/csv-columns.md` explains each column."""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context as multiprocessing_context
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.errors import TraceError
from analysis.metrics.audit import audit
from analysis.metrics.exposure import Exposure, exposure
from analysis.metrics.holistic import HolisticFigures, holistic_figures
from analysis.metrics.memory import memory_row
from analysis.traces.collectives import KINDS
from analysis.traces.finding import OWN_NAME, Window, missing_ranks, rank_in_path
from analysis.traces.reading import read_trace
from analysis.traces.timeline import RankTimeline, build_timeline
from analysis.wording import listed
from training.config import RECORD_VERSION

KIND_SENTENCES = {
    "cpu": "CPU trace: operators of the training thread and Gloo spans, lowered to kernels on virtual streams.",
    "cuda": "GPU trace: device kernels as recorded.",
    "cuda over gloo": "GPU trace, collectives on Gloo's CPU threads: the device shows only compute and copies, "
    "so what HTA says of exposed communication, idle time and overlap is unknown.",
}


@dataclass(frozen=True)
class WindowAnalysis:
    """Everything that a report on one window shows.

    Attributes:
        summary: The table of `summary.csv`, a row a rank.
        audit: The table of `audit.csv`, a row a check; empty without a run record.
        record: The run record that belongs to the window; None for foreign traces.
        problems: What cannot be used of the run, a sentence each. A window with any is incomplete, and has no figures
            that compare ranks.
    """

    window: Window
    timelines: list[RankTimeline]
    figures: HolisticFigures
    summary: pd.DataFrame
    audit: pd.DataFrame
    exposure: Exposure
    record: dict[str, Any] | None
    problems: list[str]

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
    """Read and analyse all ranks of a window; what cannot be read makes it incomplete.

    Args:
        multiprocessing: Read ranks in as many processes as there are cores.
        on_rank: Called after each rank's trace is read, for a progress bar.

    Raises:
        TraceError: no rank's trace can be used, or the ranks' traces do not belong together.
    """
    timelines, problems = [], []
    for rank, found in read_ranks(window, include_last_step, multiprocessing):
        if isinstance(found, RankTimeline):
            timelines.append(found)
        else:
            problems.append(found)
        on_rank(rank)
    if not timelines:
        more = f" (nor can the {len(problems) - 1} others be used)" if len(problems) > 1 else ""
        raise TraceError(f"{problems[0]}{more}")
    require_comparable(timelines)
    missing = missing_ranks(window, timelines[0].world_size)
    if missing:
        problems.append(f"no trace of rank {listed(missing)}; copy the missing files here, or profile again")
    figures = holistic_figures(timelines)
    record = find_record(window)
    rows = [{**summary_row(timeline, figures), **memory_row(record, timeline.rank)} for timeline in timelines]
    return WindowAnalysis(
        window=window,
        timelines=timelines,
        figures=figures,
        summary=pd.DataFrame(rows),
        audit=audit(timelines, None if record and failure_of(record) else record),
        exposure=exposure(timelines, is_complete=not problems),
        record=record,
        problems=problems,
    )


def read_ranks(
    window: Window, include_last_step: bool, multiprocessing: bool
) -> Iterator[tuple[int, RankTimeline | str]]:
    """Each rank with its timeline, or with what is wrong with its trace; one trace at a time is held in memory."""
    jobs = [(path, rank, include_last_step) for rank, path in window.files.items()]
    if not multiprocessing or len(jobs) == 1:
        yield from zip(window.files, itertools.starmap(read_rank, jobs), strict=True)
        return
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), multiprocessing_context("spawn")) as pool:
        yield from zip(window.files, pool.map(read_rank, *zip(*jobs, strict=True)), strict=True)


def read_rank(path: Path, rank: int, include_last_step: bool) -> RankTimeline | str:
    try:
        trace = read_trace(path)
        said = trace.info.get("rank")
        if OWN_NAME.match(path.name) and rank_in_path(path) is not None and said not in (None, rank):
            return f"{path}: the file says that it is of rank {said}; its name, of rank {rank}"
        return build_timeline(trace, rank, include_last_step)
    except TraceError as error:
        return str(error)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:  # of what strangers write
        return f"{path}: holds events that are no profiler's ({type(error).__name__}: {' '.join(str(error).split())})"


def require_comparable(timelines: list[RankTimeline]) -> None:
    """Refuse ranks that saw different steps, different kinds of device or different numbers of ranks.

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
        if other.world_size != first.world_size:
            raise TraceError(
                f"{other.path} is of {other.world_size} ranks, but {first.path} of {first.world_size}; these are not "
                "of the same run"
            )


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
    return read_record(path, failed_too=True) if path.exists() else None


def read_record(path: Path, failed_too: bool = False) -> dict[str, Any]:
    """The content of a run record.

    Args:
        failed_too: Also of a run that did not end well; what it did not come to is empty or None.

    Raises:
        TraceError: it cannot be read, or is none, or the run did not end well.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: cannot be read as a run record ({error})") from None
    if not isinstance(record, dict) or "run_id" not in record or "choice" not in record:
        raise TraceError(f"{path}: no run record (run_id and choice are missing)")
    if record.get("schema_version") != RECORD_VERSION:
        raise TraceError(
            f"{path}: a run record of version {record.get('schema_version')}, but this program reads version "
            f"{RECORD_VERSION}; train again"
        )
    problem = failure_of(record)
    if problem and not failed_too:
        raise TraceError(f"{path}: {problem}, so it is no whole run; train again")
    required = {name: kind for name, kind in REQUIRED.items() if name != "eval" or not problem}
    wrong = [name for name, kind in required.items() if not isinstance(record.get(name), kind)]
    if wrong or not all(isinstance(row, dict) for row in record["memory"]):
        raise TraceError(f"{path}: a damaged run record ({', '.join(wrong) or 'memory'}); train again")
    return record


def failure_of(record: dict[str, Any]) -> str:
    """How a run ended if it did not end well, in words; else empty."""
    ended = record.get("ended")
    if not isinstance(ended, dict) or not isinstance(ended.get("how"), str):
        return "how the run ended is not in its record"
    if ended["how"] == "completed":
        return ""
    return f"this run ended early ({ended['how']}: {ended.get('message')})"


REQUIRED: dict[str, type] = {
    "config": dict,
    "eval": dict,
    "expected_traffic": list,
    "memory": list,
    "step_time_s": list,
    "step_samples": list,
    "train_loss": list,
    "world_size": int,
}
"""What reports read of a run record; docs/run-record.md says what else there is."""


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write `table` as CSV, whole or not at all; text that a spreadsheet would run as a formula gets a `'` before it.

    Raises:
        TraceError: it cannot be written.
    """

    def harmless(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value

    table = table.copy()
    for name in table.select_dtypes(["object", "str"]).columns:
        table[name] = pd.Series([harmless(value) for value in table[name]], table.index, dtype=object)
    write_text(path, table.to_csv(index=False))


FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""OWASP, CSV Injection."""


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
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise TraceError(f"cannot write {path}: {error.strerror}") from None
