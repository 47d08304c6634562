"""The summary of one window of one choice: a row a rank. `docs/csv-columns.md` explains each column."""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context as multiprocessing_context
from pathlib import Path
from typing import Any

import pandas as pd

from ddp_lab.analysis.mesh import mesh_of
from ddp_lab.analysis.metrics.audit import audit
from ddp_lab.analysis.metrics.exposure import Exposure, disagreements, exposure
from ddp_lab.analysis.metrics.holistic import holistic_figures
from ddp_lab.analysis.metrics.memory import memory_row
from ddp_lab.analysis.metrics.pipeline import pipelines
from ddp_lab.analysis.record import failure_of, profiled_ranks, read_record
from ddp_lab.analysis.traces.collectives import sent_bytes
from ddp_lab.analysis.traces.finding import OWN_NAME, Window, missing_ranks, rank_in_path
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.analysis.traces.timeline import RankTimeline, build_timeline
from ddp_lab.collectives.kinds import LABELS
from ddp_lab.runtime.errors import UserError, listed

KIND_SENTENCES = {
    "cpu": "CPU trace: operators of the training thread and Gloo spans, shown as kernels on virtual streams.",
    "cuda": "GPU trace: device kernels as recorded.",
    "cuda over gloo": "GPU trace, collectives on Gloo's CPU threads: the device shows only compute and copies, "
    "so HTA's exposed communication, idle time and overlap are unknown.",
    "cuda without collectives": "GPU trace without the kernels of its collectives: what was sent, exposed "
    "communication, idle time and overlap are unknown.",
}
HTA_PARTS = ("compute", "non_compute", "idle")
MOST_PROCESSES = 8
"""Each process holds a whole trace, so their number bounds the memory of a report."""


@dataclass(frozen=True)
class WindowAnalysis:
    """Everything that a report on one window shows.

    Attributes:
        summary: The table of `summary.csv`, a row a rank.
        audit: The table of `audit.csv`, a row a check; empty without a run record.
        passes: What the ranks of pipelines did (`metrics.pipeline.pipelines`); empty in an incomplete window.
        record: The run record that belongs to the window; None for foreign traces.
        problems: What of the run cannot be used, a sentence each. A window with problems is incomplete, and has no
            figures that compare ranks.
        doubts: A line for each trace with something wrong in it, and for ranks that do not fit together
            (`traces.checks`, `metrics.exposure.disagreements`).
    """

    window: Window
    timelines: list[RankTimeline]
    summary: pd.DataFrame
    audit: pd.DataFrame
    exposure: Exposure
    passes: pd.DataFrame
    record: dict[str, Any] | None
    problems: list[str]
    doubts: list[str]

    @property
    def kind_sentence(self) -> str:
        first = self.timelines[0]
        hidden = "cuda without collectives" if first.collectives.empty else "cuda over gloo"
        return KIND_SENTENCES[hidden if first.hides_communication else first.kind]


def analyse_window(
    window: Window,
    include_last_step: bool = False,
    multiprocessing: bool = False,
    on_rank: Callable[[int], None] = lambda rank: None,
) -> WindowAnalysis:
    """Read and analyse all ranks of a window. A rank that cannot be read makes it incomplete.

    Args:
        multiprocessing: Read ranks in as many processes as there are cores, at most `MOST_PROCESSES`.
        on_rank: Called after each rank's trace is read, for a progress bar.

    Raises:
        UserError: no rank's trace can be used, or the ranks' traces do not belong together.
    """
    # read every rank
    timelines, figures, problems = [], {}, []
    for rank, result in read_ranks(window, include_last_step, multiprocessing):
        if isinstance(result, str):
            problems.append(result)
        else:
            timeline, figures[rank] = result
            timelines.append(timeline)
        on_rank(rank)
    if not timelines:
        more = f" (nor can the {len(problems) - 1} others be used)" if len(problems) > 1 else ""
        raise UserError(f"{problems[0]}{more}")
    # do the ranks and the record belong together?
    require_comparable(timelines)
    record = find_record(window)
    absent = missing_ranks(window, timelines[0].world_size)
    missing = [rank for rank in absent if record is None or rank in profiled_ranks(record)]
    if missing:
        problems.append(f"no trace of rank {listed(missing)}; copy the missing files here, or profile again")
    is_complete, mesh = not (problems or absent), mesh_of(record)
    # figures that compare ranks
    exposed = exposure(timelines, is_complete, mesh)
    doubts = [*doubts_of(timelines), *(disagreements(timelines, exposed) if is_complete else ())]
    rows = [summary_row(timeline, figures[timeline.rank]) | memory_row(record, timeline.rank) for timeline in timelines]
    return WindowAnalysis(
        window=window,
        timelines=timelines,
        summary=pd.DataFrame(rows),
        audit=audit(timelines, None if record and failure_of(record) else record),
        exposure=exposed,
        passes=pipelines(timelines, exposed.clocks, mesh if is_complete else None),
        record=record,
        problems=problems,
        doubts=doubts,
    )


def doubts_of(timelines: list[RankTimeline]) -> list[str]:
    """A line for each trace with notes. Traces whose notes differ only in numbers share the line of the first one."""
    alike_traces: dict[str, list[str]] = {}
    for timeline in timelines:
        if notes := "; ".join(timeline.notes):
            alike_traces.setdefault(re.sub(r"\d+", "", notes), []).append(f"{timeline.path}: {notes}")
    return [alike[0] + f" ({len(alike)} traces are like this)" * (len(alike) > 1) for alike in alike_traces.values()]


def read_ranks(
    window: Window, include_last_step: bool, multiprocessing: bool
) -> Iterator[tuple[int, tuple[RankTimeline, dict[Any, float]] | str]]:
    """Each rank with the result of `analyse_rank`. A process holds one trace in memory at a time."""
    jobs = [(path, rank, include_last_step) for rank, path in window.files.items()]
    if not multiprocessing or len(jobs) == 1:
        yield from zip(window.files, itertools.starmap(analyse_rank, jobs), strict=True)
        return
    with ProcessPoolExecutor(
        min(len(jobs), os.cpu_count() or 1, MOST_PROCESSES), multiprocessing_context("spawn")
    ) as pool:
        yield from zip(window.files, pool.map(analyse_rank, *zip(*jobs, strict=True)), strict=True)


def analyse_rank(path: Path, rank: int, include_last_step: bool) -> tuple[RankTimeline, dict[Any, float]] | str:
    """A rank's timeline and its row of `holistic_figures`, or what is wrong with its trace."""
    timeline = read_rank(path, rank, include_last_step)
    if isinstance(timeline, str):
        return timeline
    try:
        return timeline, holistic_figures([timeline]).iloc[0].to_dict()
    except UserError as error:
        return str(error)


def read_rank(path: Path, rank: int, include_last_step: bool) -> RankTimeline | str:
    try:
        trace = read_trace(path)
        stated = trace.info.get("rank")
        if OWN_NAME.match(path.name) and rank_in_path(path) is not None and stated not in (None, rank):
            return f"{path}: the file says that it is of rank {stated}; its name says rank {rank}"
        timeline = build_timeline(trace, rank, include_last_step)
        if type(stated) is int and stated != rank:
            note = f"the file says that it is of rank {stated}, as another does; by its name it counts as rank {rank}"
            return replace(timeline, notes=[note, *timeline.notes])
        return timeline
    except UserError as error:
        return str(error)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:  # in foreign files
        return f"{path}: has events that no profiler writes ({type(error).__name__}: {' '.join(str(error).split())})"


def require_comparable(timelines: list[RankTimeline]) -> None:
    """Refuse ranks with different steps, kinds of device or world sizes.

    Raises:
        UserError: names the file that differs.
    """
    first = timelines[0]
    for peer in timelines[1:]:
        for field, first_value, value in (
            ("steps", first.steps["number"].tolist(), peer.steps["number"].tolist()),
            ("a device of kind", first.kind, peer.kind),
            ("a world size of", first.world_size, peer.world_size),
        ):
            if first_value != value:
                raise UserError(
                    f"{peer.path}: has {field} {value}, but {first.path} has {first_value}; they are not of the same "
                    "run or window"
                )


def summary_row(timeline: RankTimeline, figures: dict[Any, float]) -> dict[str, Any]:
    """The row of `summary.csv` for one rank. Times are of the profiled steps.

    Args:
        figures: The rank's row of `holistic_figures`.
    """
    steps, calls = len(timeline.steps), timeline.collectives
    if timeline.hides_communication:
        figures = figures | dict.fromkeys(("non_compute_us", "idle_us", "overlap_pct"), float("nan"))
    sent = {
        "collective_calls_per_step": len(calls) / steps,
        "collective_bytes_per_step": calls["bytes"].sum(skipna=False) / steps,
        "collective_sent_bytes_per_step": sent_bytes(calls).sum(skipna=False) / steps,
        **collectives_by_kind(calls, steps),
    }
    if timeline.hides_communication and calls.empty:
        sent = dict.fromkeys(sent, float("nan"))
    return {
        "rank": timeline.rank,
        "world_size": timeline.world_size,
        "trace_kind": timeline.kind,
        "steps": steps,
        "profiled_step_ms": round(float((timeline.windows[:, 1] - timeline.windows[:, 0]).mean()) / 1000, 3),
        **{f"{part}_ms": round(figures[f"{part}_us"] / steps / 1000, 3) for part in HTA_PARTS},
        **{f"{part}_pct": round(100 * figures[f"{part}_us"] / figures["total_us"], 2) for part in HTA_PARTS},
        "overlap_pct": figures["overlap_pct"],
        **sent,
    }


def collectives_by_kind(collectives: pd.DataFrame, steps: int) -> dict[str, float]:
    """Calls, payload and summed durations a step, of each of `LABELS`. A payload is NaN if a size is unknown."""
    kinds = collectives["kind"].where(collectives["kind"].isin(LABELS), "other")
    row = {}
    for kind in LABELS:
        calls = collectives[kinds == kind]
        row[f"{kind}_calls_per_step"] = len(calls) / steps
        row[f"{kind}_bytes_per_step"] = calls["bytes"].sum(skipna=False) / steps
        row[f"{kind}_ms_per_step"] = round((calls["end"] - calls["start"]).sum() / steps / 1000, 3)
    return row


def find_record(window: Window) -> dict[str, Any] | None:
    """The run record beside a window's rank folders, if there is one. Folders of several nodes may lie apart.

    Raises:
        UserError: it is there but cannot be read.
    """
    folders = {path.parent.parent: None for path in window.files.values()}  # in order
    paths = [folder / f"{window.run_id}.run.json" for folder in folders]
    return next((read_record(path, failed_too=True) for path in paths if path.exists()), None)
