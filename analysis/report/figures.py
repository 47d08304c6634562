"""Plotly figures. Colours (Okabe and Ito's, safe for colour-blind readers) mean the same everywhere."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analysis.intervals import Intervals, bridge, clip, minus, union
from analysis.timeline import PHASES, RankTimeline

COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#009E73",
    "other compute": "#8C8C8C",
    "compute": "#0072B2",
    "communication": "#E69F00",
    "exposed": "#D55E00",
    "idle": "#E4E4E4",
    "memory copy": "#CC79A7",
}
LANE_HEIGHT_PX = 30
SMALLEST_GAP_US = 30.0
"""Gaps below this are not drawn: thousands of them would make a page heavy, and nobody could see one."""


def lanes_figure(timelines: Sequence[RankTimeline], step: int) -> go.Figure:
    """One optimizer step of every rank: what its compute lane did, and each communication lane under it.

    Time 0 is the start of the step on that rank's own clock.
    """
    figure = go.Figure()
    segments: dict[str, list[tuple[str, float, float]]] = {name: [] for name in COLOURS}
    lanes: list[str] = []
    for timeline in timelines:
        bounds = timeline.steps[timeline.steps["number"] == step]
        start, end = float(bounds["start"].iloc[0]), float(bounds["end"].iloc[0])
        main_lane = f"rank {timeline.rank}  compute"
        lanes.append(main_lane)
        for name, intervals in compute_lane(timeline, start, end).items():
            segments[name] += [(main_lane, first - start, last - start) for first, last in intervals]
        for lane, name in (("communication", "communication"), ("memory", "memory copy")):
            kernels = timeline.kernels[timeline.kernels["lane"] == lane]
            for index, (_, stream) in enumerate(kernels.groupby("stream", sort=True)):
                label = f"rank {timeline.rank}  {name} {index + 1}"
                lanes.append(label)
                drawn = clip(stream[["start", "end"]].to_numpy(float), start, end)
                segments[name] += [(label, first - start, last - start) for first, last in union(drawn)]
    for name, drawn_segments in segments.items():
        if drawn_segments:
            frame = pd.DataFrame(drawn_segments, columns=["lane", "start", "end"])
            figure.add_bar(
                y=frame["lane"],
                base=(frame["start"] / 1000).round(3),
                name=LANE_NAMES.get(name, name),
                orientation="h",
                x=((frame["end"] - frame["start"]) / 1000).round(3),
                marker={"color": COLOURS[name], "line": {"width": 0}},
                hovertemplate="%{fullData.name}: %{x:.2f} ms, from %{base:.2f} ms<extra></extra>",
            )
    figure.update_layout(barmode="overlay", bargap=0.25, height=120 + LANE_HEIGHT_PX * len(lanes))
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], title=None)
    figure.update_xaxes(title="ms since the step began")
    return styled(figure)


LANE_NAMES = {"exposed": "exposed communication", "communication": "collective"}


def compute_lane(timeline: RankTimeline, start: float, end: float) -> dict[str, Intervals]:
    """The compute lane between two moments: compute by phase, and what the rest of the time was."""
    compute = clip(timeline.intervals("compute"), start, end)
    communication = clip(timeline.intervals("communication"), start, end)
    drawn: dict[str, Intervals] = {}
    rest = compute
    for phase in PHASES:
        if phase != "gradient_sync" and timeline.kind == "cpu":  # on a device, kernels run later than their range
            bounds = timeline.phases[timeline.phases["name"] == phase][["start", "end"]].to_numpy(float)
            inside = np.array([((bounds[:, 0] <= s) & (s < bounds[:, 1])).any() for s in rest[:, 0]], dtype=bool)
            drawn[phase] = bridge(rest[inside], SMALLEST_GAP_US)
            rest = rest[~inside] if len(rest) else rest
    drawn["other compute" if timeline.kind == "cpu" else "compute"] = bridge(rest, SMALLEST_GAP_US)
    busy = bridge(compute, SMALLEST_GAP_US)
    drawn["exposed"] = minus(union(communication), busy)
    drawn["idle"] = minus(np.array([[start, end]]), union(np.concatenate([busy, communication])))
    return drawn


def breakdown_figure(labels: Sequence[str], table: pd.DataFrame) -> go.Figure:
    """Stacked shares of compute, exposed communication and idle time, a bar a row of `table`."""
    figure = go.Figure()
    for column, name, colour in (
        ("compute_pct", "compute", "compute"),
        ("non_compute_pct", "exposed communication", "exposed"),
        ("idle_pct", "idle", "idle"),
    ):
        figure.add_bar(
            y=list(labels),
            x=table[column],
            name=name,
            orientation="h",
            marker={"color": COLOURS[colour]},
            hovertemplate="%{y}: %{x:.1f} % " + name + "<extra></extra>",
        )
    figure.update_layout(barmode="stack", height=130 + 28 * len(labels))
    figure.update_xaxes(title="% of the profiled steps", range=[0, 100])
    figure.update_yaxes(autorange="reversed")
    return styled(figure)


def styled(figure: go.Figure) -> go.Figure:
    figure.update_layout(
        template="plotly_white",
        margin={"l": 10, "r": 20, "t": 20, "b": 40},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "traceorder": "normal"},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    figure.update_yaxes(automargin=True)
    return figure
