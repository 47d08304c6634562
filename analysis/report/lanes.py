"""What the lanes of one step show: merged intervals to see at a glance, and single kernels to zoom in on.

Both have a budget, so that a page stays light whatever a trace holds.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.intervals import Intervals, bridge, clip, minus, union
from analysis.timeline import PHASES, RankTimeline

SMALLEST_GAP_US = 30.0
"""Gaps below this are not drawn: nobody could see one."""
MOST_INTERVALS = 4000
"""Merged intervals that all compute lanes of a figure have together; where they would have more, larger gaps close."""
MOST_KERNELS = 1600
"""Kernels that a figure shows one by one."""
MOST_STREAMS = 4
"""Streams of a kind that a rank has lanes for: those with the most time."""


def bounds(timeline: RankTimeline, step: int) -> tuple[float, float]:
    """Start and end of a step."""
    found = timeline.steps[timeline.steps["number"] == step]
    return float(found["start"].iloc[0]), float(found["end"].iloc[0])


def compute_lane(timeline: RankTimeline, start: float, end: float, most: int = MOST_INTERVALS) -> dict[str, Intervals]:
    """The compute lane between two moments: compute by phase, and what the rest of the time was."""
    compute = union(clip(timeline.intervals("compute"), start, end))
    communication = union(clip(timeline.intervals("communication"), start, end))
    phase = phase_of(timeline, compute[:, 0])
    gap = SMALLEST_GAP_US
    while True:
        drawn = {name: bridge(compute[phase == name], gap) for name in dict.fromkeys(phase)}
        busy, sent = bridge(compute, gap), bridge(communication, gap if gap > SMALLEST_GAP_US else 0)
        drawn["exposed"] = minus(sent, busy)
        drawn["idle"] = minus(np.array([[start, end]]), union(np.concatenate([busy, sent])))
        if sum(map(len, drawn.values())) <= most or gap > end - start:
            return drawn
        gap *= 2


def phase_of(timeline: RankTimeline, moments: Intervals) -> NDArray[np.object_]:
    """The phase in which compute that starts at each of `moments` belongs.

    On a device kernels run later than the range that launched them, so there it is `compute` alone.
    """
    phase = np.full(len(moments), "compute" if timeline.kind == "cuda" else "other compute", dtype=object)
    for name in PHASES if timeline.kind == "cpu" else ():
        if name != "gradient_sync":
            spans = union(timeline.phases.loc[timeline.phases["name"] == name, ["start", "end"]].to_numpy(float))
            inside = np.searchsorted(spans[:, 0], moments, "right") > np.searchsorted(spans[:, 1], moments, "right")
            phase[inside & (phase == "other compute")] = name
    return phase


def kernels_of(timeline: RankTimeline, start: float, end: float) -> pd.DataFrame:
    """Kernels between two moments, cut to them, in time order, with a column length."""
    kernels = timeline.kernels
    inside = kernels[(kernels["start"] < end) & (kernels["end"] > start)]
    cut = inside.assign(start=inside["start"].clip(lower=start), end=inside["end"].clip(upper=end))
    return cut.assign(length=cut["end"] - cut["start"]).sort_values("start")


def shown_kernels(timeline: RankTimeline, start: float, end: float, most: int) -> pd.DataFrame:
    """The `most` longest of `kernels_of`, on the streams that have lanes."""
    kernels = kernels_of(timeline, start, end)
    time = kernels.groupby(["lane", "stream"])["length"].sum().reset_index()
    streams = time.sort_values("length", ascending=False).groupby("lane").head(MOST_STREAMS)
    with_lane = kernels.merge(streams[["lane", "stream"]], on=["lane", "stream"])
    return with_lane.loc[with_lane["length"].nlargest(most).index].sort_values("start")


def kernels_sentence(timelines: Sequence[RankTimeline], step: int) -> str:
    """How much of a step's kernels the figure shows one by one."""
    drawn = total = 0
    drawn_us = total_us = 0.0
    for timeline in timelines:
        every = kernels_of(timeline, *bounds(timeline, step))
        shown = shown_kernels(timeline, *bounds(timeline, step), MOST_KERNELS // len(timelines))
        drawn, total = drawn + len(shown), total + len(every)
        drawn_us, total_us = drawn_us + shown["length"].sum(), total_us + every["length"].sum()
    rest = "are drawn one by one: zoom in for their names, and point at one for its times."
    if drawn == total:
        return f"All {total:,} kernels of the step {rest}"
    share = 100 * drawn_us / total_us
    return f"The longest {drawn:,} of {total:,} kernels of the step, {share:.0f} % of their time, {rest} The trace has all."
