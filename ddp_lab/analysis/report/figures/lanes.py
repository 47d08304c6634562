"""The data of lanes of one step: merged intervals for an overview, and single kernels to zoom in on.

Both have a budget, so that a page stays small for any trace.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddp_lab.analysis.mesh import Mesh
from ddp_lab.analysis.metrics.dimensions import dimensions
from ddp_lab.analysis.traces.intervals import Intervals, bridge, clip, minus, union, within
from ddp_lab.analysis.traces.timeline import PHASES, RankTimeline
from ddp_lab.collectives.kinds import label

SMALLEST_GAP_US = 30.0
"""Smaller gaps are closed, since they cannot be seen."""
MOST_INTERVALS = 4000
"""Merged intervals of all compute lanes of a figure together. To keep to it, larger gaps are closed too."""
MOST_KERNELS = 2400
"""Kernels that a figure draws one by one."""
MOST_STREAMS = 4
"""Lanes for streams of one kind on a rank: those with the most time."""


def bounds(timeline: RankTimeline, step: int) -> tuple[float, float]:
    """Start and end of a step; on a device, of its work there."""
    start, end = timeline.windows[timeline.steps["number"] == step][0]
    return float(start), float(end)


def with_named_streams(timeline: RankTimeline, mesh: Mesh | None) -> RankTimeline:
    """`timeline` with a communication stream for each dimension of the mesh. Without a mesh, it is for each process
    group of a device, or for each kind of collective over Gloo.

    Over Gloo each collective becomes one kernel. On a device each process group has its own streams, so a stream has
    the name of most of its calls.
    """
    calls, kernels = timeline.collectives, timeline.kernels
    kinds = [label(*of) for of in zip(calls["kind"], calls["made_of"], strict=True)]
    names = dimensions(calls["group"], mesh) if mesh else calls["group"]
    if timeline.kind == "cpu" and len(calls):
        spans = calls.assign(lane="communication", stream=names if mesh else kinds, name=kinds, launch=calls["issued"])
        without_spans = kernels[kernels["lane"] != "communication"]
        return replace(timeline, kernels=pd.concat([without_spans, spans[without_spans.columns]], ignore_index=True))
    of_stream = names.groupby(calls["stream"].str.removeprefix("stream ")).agg(lambda names: names.mode().iloc[0])
    named = kernels["stream"].map(of_stream.to_dict()).fillna("")
    has_name = (kernels["lane"] == "communication") & ((named != "") | (mesh is not None))
    return replace(timeline, kernels=kernels.assign(stream=named.where(has_name, kernels["stream"])))


def compute_lane(
    timeline: RankTimeline, start: float, end: float, gap: float = SMALLEST_GAP_US
) -> dict[str, Intervals]:
    """The compute lane between two moments: compute by phase, and exposed communication and idle time in the rest.

    Args:
        gap: Gaps in compute below this (us) are closed.
    """
    compute = union(clip(timeline.intervals("compute"), start, end))
    sent = union(clip(timeline.intervals("communication"), start, end))
    phase = phase_of(timeline, compute[:, 0])
    drawn = {name: bridge(compute[phase == name], gap) for name in dict.fromkeys(phase)}
    busy = bridge(compute, gap)
    if gap > SMALLEST_GAP_US:  # collectives count for the budget too
        sent = bridge(sent, gap)
    drawn["exposed"] = minus(sent, busy)
    drawn["idle"] = minus(np.array([[start, end]]), union(np.concatenate([busy, sent])))
    return drawn


def gap_to_close(shown: Sequence[tuple[RankTimeline, int]]) -> float:
    """The smallest gap (us) to close so that all compute lanes of a figure together keep to `MOST_INTERVALS`.

    Args:
        shown: The timeline and the step of each lane.
    """
    gap, length = SMALLEST_GAP_US, max(np.ptp(bounds(timeline, step)) for timeline, step in shown)
    while gap < length:
        lanes = [compute_lane(timeline, *bounds(timeline, step), gap) for timeline, step in shown]
        if sum(len(intervals) for lane in lanes for intervals in lane.values()) <= MOST_INTERVALS:
            break
        gap *= 2
    return gap


def phase_of(timeline: RankTimeline, moments: NDArray[np.float64]) -> NDArray[np.object_]:
    """The phase of compute that starts at each of `moments`.

    On a device it is always `compute`, since a kernel may run after the phase that launched it.
    """
    phase = np.full(len(moments), "compute" if timeline.kind == "cuda" else "other compute", dtype=object)
    for name in PHASES if timeline.kind == "cpu" else ():
        if name != "gradient_sync":
            spans = union(timeline.phases.loc[timeline.phases["name"] == name, ["start", "end"]].to_numpy(float))
            phase[within(moments, spans) & (phase == "other compute")] = name
    return phase


def lane_kernels(timeline: RankTimeline, start: float, end: float, most: int) -> pd.DataFrame:
    """Kernels between two moments, cut to them, in time order, on streams that have lanes; with columns length, and
    single: whether the kernel is drawn on its own.

    The longest kernels are: half of `most` in compute, a quarter each in communication and memory copies.
    """
    inside = timeline.kernels[(timeline.kernels["start"] < end) & (timeline.kernels["end"] > start)]
    cut = inside.assign(start=inside["start"].clip(lower=start), end=inside["end"].clip(upper=end))
    kernels = cut.assign(length=cut["end"] - cut["start"]).sort_values("start")
    time = kernels.groupby(["lane", "stream"])["length"].sum().reset_index()
    streams = time.sort_values("length", ascending=False).groupby("lane").head(MOST_STREAMS)
    with_lane = kernels.merge(streams[["lane", "stream"]], on=["lane", "stream"])
    place = with_lane.groupby("lane")["length"].rank(method="first", ascending=False)
    limit = np.where(with_lane["lane"] == "compute", most // 2, most // 4)
    return with_lane.assign(single=place <= limit).sort_values("start")


def merged(intervals: Intervals, gap: float, most: int) -> Intervals:
    """At most `most` intervals that cover `intervals`: gaps below `gap` are closed, and larger ones if needed."""
    while len(bridged := bridge(intervals, gap)) > most:
        gap *= 2
    return bridged
