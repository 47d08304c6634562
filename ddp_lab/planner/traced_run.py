"""What a recorded run says of itself: how long a step takes, how much of it is compute, and how long collectives take.

Compute is all time in which a rank does not only wait for a collective.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from ddp_lab.analysis.comparison.choices import last_window
from ddp_lab.analysis.comparison.compare import latest_record
from ddp_lab.analysis.errors import TraceError
from ddp_lab.analysis.files import read_record
from ddp_lab.analysis.summary import read_rank
from ddp_lab.analysis.traces.intervals import Intervals, clip, length, minus, union
from ddp_lab.analysis.traces.timeline import RankTimeline
from ddp_lab.planner.costs.volumes import KINDS
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.link_model import LinkModel, Piece

MOST_RANKS_READ = 8
"""More traces of a run would say little more."""


@dataclass(frozen=True)
class TracedRun:
    """A run, and what its traces say.

    Attributes:
        kind: `cuda` or `cpu`.
        step_s: Median of the steps without profiler.
        compute_s: Seconds of a profiled step in which the rank does not only wait.
        collectives: Seconds by payload bytes, for each kind.
    """

    record: Mapping[str, Any]
    config: RunConfig
    kind: str
    step_s: float
    compute_s: float
    collectives: Mapping[str, LinkModel]

    @property
    def world_size(self) -> int:
        return int(self.record["world_size"])


def read_run(path: Path) -> TracedRun:
    """A run by its record (`profile/<choice>/<run_id>.run.json`), or the latest of a folder `profile/<choice>`.

    Raises:
        UserError: there is none, it ended early, or it has no traces that can be used.
    """
    record, config = read_recorded(path)
    try:
        window = last_window(path if path.is_dir() else path.parent, record["run_id"])
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
    compute_s = fmean(map(compute_seconds, timelines))
    return TracedRun(record, config, timelines[0].kind, step_s, compute_s, models)


def read_recorded(path: Path) -> tuple[Mapping[str, Any], RunConfig]:
    """The record of a run, for `path` see `read_run`, and its settings.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    try:
        record = latest_record(path) if path.is_dir() else read_record(path)
    except TraceError as error:
        raise UserError(str(error)) from None
    if record is None:
        raise UserError(f"{path}: no run record (*.run.json) in this folder; give profile/<choice> of a run")
    known = RunConfig.__dataclass_fields__
    try:
        config = RunConfig(**{name: value for name, value in record["config"].items() if name in known})
    except (TypeError, AttributeError):
        raise UserError(f"{path}: its settings cannot be read; train again") from None
    return record, replace(config, choice=record["choice"])


def compute_seconds(timeline: RankTimeline) -> float:
    """As in `TracedRun.compute_s`: the mean over steps."""
    sent = union(timeline.collectives[["start", "end"]].to_numpy(dtype=np.float64))
    waiting = minus(sent, union(timeline.intervals("compute")))
    steps = timeline.windows
    waited = sum(length(clip(waiting, start, end)) for start, end in steps)
    return (length(steps) - waited) * 1e-6 / len(steps)


def fits(timelines: Sequence[RankTimeline]) -> dict[str, LinkModel]:
    """Seconds by payload of each kind of collective that sent something. Of all ranks the shortest duration of a
    collective counts, since the others waited for the last rank. If all collectives of a kind had one size, the time is
    taken to be in proportion to it: how much of it is latency cannot be known."""
    calls = pd.concat([numbered(timeline.collectives) for timeline in timelines])
    shortest = calls.groupby(["kind", "bytes", "number"])["seconds"].min().reset_index()
    models = {}
    for kind, of_kind in shortest[shortest["seconds"] > 0].groupby("kind"):
        sizes, times = of_kind["bytes"], of_kind["seconds"]
        if sizes.min() == sizes.max():
            models[str(kind)] = LinkModel((Piece(0.0, 0.0, times.median() / sizes.min()),))
        else:
            models[str(kind)] = LinkModel.fit(sizes, times, most_pieces=1)
    return models


def numbered(collectives: pd.DataFrame) -> pd.DataFrame:
    """Those that send something, with `seconds`, and a `number` by which the same one is found on other ranks."""
    calls = collectives[collectives["kind"].isin(KINDS) & (collectives["bytes"] > 0)]
    calls = calls.sort_values("issued", kind="stable")
    seconds = shared_out(calls[["start", "end"]].to_numpy(dtype=np.float64)) * 1e-6
    return calls.assign(seconds=seconds, number=calls.groupby(["kind", "bytes"]).cumcount())


def shared_out(intervals: Intervals) -> np.ndarray:
    """The length of each interval, where a moment that several cover counts for each with an equal share."""
    edges = np.unique(intervals)
    begins, ends = edges[:-1], edges[1:]
    covers = (intervals[:, :1] <= begins) & (intervals[:, 1:] >= ends)
    return (covers * ((ends - begins) / np.maximum(covers.sum(axis=0), 1))).sum(axis=1)
