"""Plotly figures. Colours (Okabe and Ito's, safe for colour-blind readers) mean the same everywhere.

A colour `var(--name)` is one of the page's style sheet, which has another in its dark theme.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analysis.report.lanes import (
    MOST_KERNELS,
    bounds,
    compute_lane,
    gap_to_close,
    lane_kernels,
    longest,
    merged,
    phase_of,
)
from analysis.report.page import readable
from analysis.traces.intervals import Intervals
from analysis.traces.timeline import RankTimeline

COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#009E73",
    "other compute": "#8C8C8C",
    "compute": "#0072B2",
    "communication": "#E69F00",
    "exposed": "#D55E00",
    "idle": "var(--idle)",
    "memory copy": "#CC79A7",
}
TEXT_COLOURS = {"backward": "white", "compute": "white", "idle": "var(--ink)"}
"""Of text on a bar; black on all others."""
LANE_HEIGHT_PX = 30
LANE_NAMES = {"exposed": "exposed communication", "communication": "collective"}
STREAM_NAMES = {"compute": "kernels", "communication": "collectives", "memory": "copies"}


def lanes_figure(timelines: Sequence[RankTimeline], step: int) -> go.Figure:
    """One optimizer step of every rank: what its compute lane did, and single kernels by stream under it.

    Time 0 is the start of the step on that rank's own clock.
    """
    parts, lanes = [], {}
    shown = [(timeline, step) for timeline in timelines]
    gap = gap_to_close(shown)
    for timeline in timelines:
        start, end = bounds(timeline, step)
        main = f"rank {timeline.rank}"
        lanes[main] = f"<b>rank {timeline.rank}</b>"
        for name, spans in compute_lane(timeline, start, end, gap).items():
            parts.append(merged_bars(spans - start, main, name, LANE_NAMES.get(name, name)))
        most = MOST_KERNELS // len(timelines)
        kernels = lane_kernels(timeline, start, end, most)
        for lane, label in STREAM_NAMES.items():
            streams = list(kernels[kernels["lane"] == lane].groupby("stream", sort=True))
            for index, (stream, calls) in enumerate(streams):
                place = f"{main} {label} {index + 1}"
                lanes[place] = f"{label} {index + 1}" if len(streams) > 1 else label
                single = calls[calls["single"]]
                if lane != "compute":  # whose other kernels stand in the main lane
                    rest = merged(calls.loc[~calls["single"], ["start", "end"]].to_numpy(float), gap, most // 8)
                    parts.append(merged_bars(rest - start, place, PARTS_OF_LANES[lane], f"shorter {label}"))
                edge = np.where(single["length"] > (end - start) / 500, "var(--paper)", "")
                part = phase_of(timeline, single["start"].to_numpy()) if lane == "compute" else PARTS_OF_LANES[lane]
                text, about = single["name"].map(literal), literal(f"stream {stream}")
                bars = single[["start", "end"]] - start
                parts.append(bars.assign(lane=place, part=part, text=text, about=about, edge=edge))
    bars = pd.concat(parts)
    figure = go.Figure()
    for name in COLOURS:
        drawn = bars[bars["part"] == name]
        if len(drawn):
            edges = [edge or COLOURS[name] for edge in drawn["edge"]]  # the shortest are seen by their edge alone
            length = ((drawn["end"] - drawn["start"]) / 1000).round(3).tolist()
            figure.add_bar(
                y=drawn["lane"].tolist(),
                base=(drawn["start"] / 1000).round(3).tolist(),
                name=LANE_NAMES.get(name, name),
                orientation="h",
                x=length,
                customdata=list(zip(drawn["about"], length, strict=True)),  # x is where the bar ends
                marker={"color": COLOURS[name], "line": {"width": 0.5, "color": edges}},
                text=drawn["text"].tolist(),
                insidetextfont={"color": TEXT_COLOURS.get(name, "black")},
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                hovertemplate="%{text}<br>%{customdata[1]:.3f} ms, from %{base:.3f} ms<br>"
                "%{customdata[0]}<extra>%{y}</extra>",
            )
    figure.update_layout(barmode="overlay", bargap=0.25, height=120 + LANE_HEIGHT_PX * len(lanes), meta={"zooms": True})
    figure.update_layout(uniformtext={"mode": "hide", "minsize": 10})  # names where there is room for them
    order = list(lanes)[::-1]
    figure.update_yaxes(
        categoryorder="array", categoryarray=order, tickvals=order, ticktext=[lanes[lane] for lane in order]
    )
    figure.update_xaxes(title="ms since the step began", range=[0, longest(shown) / 1000])
    return styled(figure)


PARTS_OF_LANES = {"communication": "communication", "memory": "memory copy"}


def merged_bars(spans: Intervals, lane: str, part: str, text: str) -> pd.DataFrame:
    """Bars that stand for more than one kernel."""
    return pd.DataFrame(spans, columns=["start", "end"]).assign(lane=lane, part=part, text=text, about="", edge="")


def literal(text: str) -> str:
    """A foreign name as Plotly shows it letter by letter, since it takes some tags for its own; cut to what fits."""
    return readable(text, 60).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


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
    """What all figures share; the page's script adds fonts and the colours of its theme.

    A drag zooms along x where the figure's `meta` says that it zooms, and scrolls the page elsewhere.
    """
    zooms = bool((figure.layout.meta or {}).get("zooms"))
    figure.update_layout(
        template="none",
        margin={"l": 10, "r": 20, "t": 20, "b": 45},
        legend={
            "orientation": "h",
            "traceorder": "normal",
            **{"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top"},
        },
        dragmode="zoom" if zooms else False,
    )
    figure.update_xaxes(fixedrange=not zooms)
    figure.update_yaxes(automargin=True, fixedrange=True)
    return figure
