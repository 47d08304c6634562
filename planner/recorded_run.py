"""What a recorded run says of itself: how long a step takes, what of it is compute, and what its collectives take.

Compute is all time in which a rank did not merely wait for a collective. Of several collectives in flight at once each
counts for its share of the time; of all ranks that were read the shortest counts, since the others waited for the last.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from analysis.comparison.choices import last_window
from analysis.comparison.compare import latest_record
from analysis.errors import TraceError
from analysis.files import read_record
from analysis.summary import read_rank
from analysis.traces.intervals import Intervals, clip, length, minus, union
from analysis.traces.timeline import RankTimeline
from planner.volumes import KINDS
from training.communication.link_model import LinkModel, Piece
from training.config import RunConfig
from training.errors import UserError

MOST_RANKS_READ = 8
"""Traces of a run that are read: more say little more of how long a collective takes."""
US = 1e-6


@dataclass(frozen=True)
class Recorded:
    """A run, and what its traces say.

    Attributes:
        step_s: Median of the steps that the profiler did not bend.
        busy_s: Seconds of a profiled step in which the rank did not only wait, by phase; `` for the rest of a step.
        collectives: Seconds by payload bytes, for each kind.
    """

    record: Mapping[str, Any]
    config: RunConfig
    kind: str
    step_s: float
    busy_s: Mapping[str, float]
    collectives: Mapping[str, LinkModel]

    @property
    def world_size(self) -> int:
        return int(self.record["world_size"])


def read_run(path: Path) -> Recorded:
    """A run by its record (`profile/<choice>/<run_id>.run.json`), or the latest of a folder `profile/<choice>`.

    Raises:
        UserError: there is none, it ended early, or it has no traces that can be used.
    """
    try:
        record = latest_record(path) if path.is_dir() else read_record(path)
        if record is None:
            raise UserError(f"{path}: no run record (*.run.json) in this folder; give profile/<choice> of a run")
        folder = path if path.is_dir() else path.parent
        window = last_window(folder, record["run_id"])
        found = [read_rank(file, rank, False) for rank, file in list(window.files.items())[:MOST_RANKS_READ]]
    except TraceError as error:
        raise UserError(str(error)) from None
    timelines = [each for each in found if isinstance(each, RankTimeline)]
    if not timelines:
        raise UserError(str(found[0]))
    step_s = record.get("step_time_median_s")
    if not step_s:
        raise UserError(f"{path}: the record has no step that was timed without the profiler; train more steps")
    models = fits(timelines)
    if not models:
        raise UserError(f"{path}: no collective with a known size is in the traces; train with two ranks or more")
    return Recorded(record, config_of(path, record), timelines[0].kind, step_s, busy_seconds(timelines), models)


def config_of(path: Path, record: Mapping[str, Any]) -> RunConfig:
    """The run's settings, of those that this version knows."""
    known = RunConfig.__dataclass_fields__
    try:
        config = RunConfig(**{name: value for name, value in record["config"].items() if name in known})
    except (TypeError, AttributeError):
        raise UserError(f"{path}: its settings cannot be read; train again") from None
    return replace(config, choice=record["choice"])


def busy_seconds(timelines: Sequence[RankTimeline]) -> dict[str, float]:
    """As in `Recorded.busy_s`, mean over steps and ranks."""
    totals: dict[str, float] = defaultdict(float)
    count = sum(len(timeline.steps) for timeline in timelines)
    for timeline in timelines:
        sent = union(timeline.collectives[["start", "end"]].to_numpy(dtype=np.float64))
        waiting = minus(sent, union(timeline.intervals("compute")))
        steps = timeline.steps[["start", "end"]].to_numpy(dtype=np.float64)
        rest = length(steps) - inside(waiting, steps)
        if timeline.kind == "cpu":
            for name, spans in timeline.phases.groupby("name"):
                phase = overlap(union(spans[["start", "end"]].to_numpy(dtype=np.float64)), steps)
                busy = length(phase) - inside(waiting, phase)
                totals[str(name)] += busy * US / count
                rest -= busy
        totals[""] += rest * US / count
    return dict(totals)


def overlap(first: Intervals, second: Intervals) -> Intervals:
    parts = [clip(first, start, end) for start, end in second]
    return union(np.concatenate(parts)) if parts else np.empty((0, 2))


def inside(intervals: Intervals, places: Intervals) -> float:
    return length(overlap(intervals, places))


def fits(timelines: Sequence[RankTimeline]) -> dict[str, LinkModel]:
    """Seconds by payload of each kind of collective that moved something, in proportion where all had one size."""
    shortest: dict[tuple[str, int, float], float] = {}
    for timeline in timelines:
        of_tensors = timeline.collectives["kind"].isin(KINDS) & (timeline.collectives["bytes"] > 0)
        calls = timeline.collectives[of_tensors].sort_values("issued", kind="stable")
        seconds = shared_out(calls[["start", "end"]].to_numpy(dtype=np.float64)) * US
        numbers: dict[tuple[str, float], int] = defaultdict(int)
        for kind, size, each in zip(calls["kind"], calls["bytes"], seconds, strict=True):
            number = numbers[kind, size]
            numbers[kind, size] += 1
            key = (kind, number, size)
            shortest[key] = min(each, shortest.get(key, float("inf")))
    by_kind: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (kind, _, size), each in shortest.items():
        if each > 0:
            by_kind[kind].append((size, each))
    models = {}
    for kind, points in by_kind.items():
        sizes, times = zip(*points, strict=True)
        if min(sizes) == max(sizes):  # which part is latency, one size does not say
            models[kind] = LinkModel((Piece(0.0, 0.0, median(times) / sizes[0]),))
        else:
            models[kind] = LinkModel.fit(sizes, times, most_pieces=1)
    return models


def shared_out(intervals: Intervals) -> np.ndarray:
    """Each interval's length, where each moment is shared out equally among all intervals that cover it."""
    edges = np.unique(intervals)
    begins, ends = edges[:-1], edges[1:]
    covers = (intervals[:, :1] <= begins) & (intervals[:, 1:] >= ends)
    return (covers * ((ends - begins) / np.maximum(covers.sum(axis=0), 1))).sum(axis=1)
