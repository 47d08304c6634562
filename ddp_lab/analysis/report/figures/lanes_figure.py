"""Figures of lanes: one step of every rank with its kernels, and one step of each choice."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ddp_lab.analysis.comparison.traced import Traced
from ddp_lab.analysis.mesh import Mesh
from ddp_lab.analysis.report.figures import (
    COLOURS,
    LANE_HEIGHT_PX,
    LANE_NAMES,
    TEXT_COLOURS,
    clip_bars,
    literal,
    styled,
)
from ddp_lab.analysis.report.figures.lanes import (
    MOST_INTERVALS,
    MOST_KERNELS,
    bounds,
    compute_lane,
    gap_to_close,
    lane_kernels,
    merged,
    phase_of,
    with_named_streams,
)
from ddp_lab.analysis.traces.intervals import Intervals, clip
from ddp_lab.analysis.traces.timeline import RankTimeline

STREAM_NAMES = {"compute": "kernels", "communication": "collectives", "memory": "copies"}
PARTS_OF_LANES = {"communication": "communication", "memory": "memory copy"}


def lanes_figure(timelines: Sequence[RankTimeline], step: int, mesh: Mesh | None = None) -> go.Figure:
    """One optimizer step of every rank: its compute lane, and below it single kernels by stream, and collectives
    by name (`with_named_streams`).

    Time 0 is the start of the step on that rank's own clock.
    """
    timelines = [with_named_streams(timeline, mesh) for timeline in timelines]
    bars, lanes = [], {}
    shown = [(timeline, step) for timeline in timelines]
    gap = gap_to_close(shown)
    for timeline in timelines:
        start, end = bounds(timeline, step)
        main = f"rank {timeline.rank}"
        lanes[main] = f"<b>rank {timeline.rank}</b>"
        bars += compute_bars(timeline, start, end, gap, main)
        # a lane for each stream
        most = MOST_KERNELS // len(timelines)
        kernels = lane_kernels(timeline, start, end, most)
        for lane, label in STREAM_NAMES.items():
            streams = list(kernels[kernels["lane"] == lane].groupby("stream", sort=True))
            for index, (stream, calls) in enumerate(streams):
                place = f"{main} {label} {index + 1}"
                lanes[place] = f"{label} {index + 1}" if len(streams) > 1 else label
                if lane == "communication" and not (name := str(stream)).isdecimal():
                    lanes[place] = f"{name or 'other'} {label}" if mesh else name
                single = calls[calls["single"]]
                if lane != "compute":  # the other compute kernels are in the main lane
                    short = merged(calls.loc[~calls["single"], ["start", "end"]].to_numpy(float), gap, most // 8)
                    bars.append(merged_bars(short - start, place, PARTS_OF_LANES[lane], f"shorter {label}"))
                edge = np.where(single["length"] > (end - start) / 500, "var(--paper)", "")
                part = phase_of(timeline, single["start"].to_numpy()) if lane == "compute" else PARTS_OF_LANES[lane]
                text, about = single["name"].map(literal), literal(f"stream {stream}")
                times = single[["start", "end"]] - start
                bars.append(times.assign(lane=place, part=part, text=text, about=about, edge=edge))
    lengths = {f"rank {timeline.rank}": np.ptp(bounds(timeline, step)) for timeline in timelines}
    return drawn_lanes(pd.concat(bars), lanes, lengths)


def lanes_by_choice_figure(traced: Mapping[str, Traced]) -> go.Figure:
    """One step of one rank of each choice: its compute lane, and below it when at least one collective ran.

    Time 0 is the start of each choice's step.
    """
    bars: list[pd.DataFrame] = []
    lanes: dict[str, str] = {}
    shown = [(run.timeline, run.step) for run in traced.values()]
    gap = gap_to_close(shown)
    for choice, (timeline, step) in zip(traced, shown, strict=True):
        start, end = bounds(timeline, step)
        below = f"{choice}  collectives"
        lanes |= {choice: choice, below: below}
        bars += compute_bars(timeline, start, end, gap, choice)
        sent = merged(clip(timeline.intervals("communication"), start, end), gap, MOST_INTERVALS // len(traced))
        bars.append(merged_bars(sent - start, below, "communication", LANE_NAMES["communication"]))
    return drawn_lanes(
        pd.concat(bars), lanes, {choice: np.ptp(bounds(*lane)) for choice, lane in zip(traced, shown, strict=True)}
    )


def compute_bars(timeline: RankTimeline, start: float, end: float, gap: float, lane: str) -> list[pd.DataFrame]:
    parts = compute_lane(timeline, start, end, gap)
    return [merged_bars(spans - start, lane, name, LANE_NAMES.get(name, name)) for name, spans in parts.items()]


def merged_bars(spans: Intervals, lane: str, part: str, text: str) -> pd.DataFrame:
    """Bars that stand for more than one kernel."""
    return pd.DataFrame(spans, columns=["start", "end"]).assign(lane=lane, part=part, text=text, about="", edge="")


def drawn_lanes(bars: pd.DataFrame, lanes: Mapping[str, str], lengths_us: Mapping[str, float]) -> go.Figure:
    """The figure.

    Args:
        bars: Columns start, end (us), lane, part (of `COLOURS`), text (on the bar), about (when pointed at), edge (its
            colour; empty for the bar's own).
        lanes: Label of each lane, from top to bottom.
        lengths_us: How long the step of a lane takes; not of every lane.
    """
    figure = go.Figure()
    for name in COLOURS:
        drawn = bars[bars["part"] == name]
        if len(drawn):
            edges = [edge or COLOURS[name] for edge in drawn["edge"]]  # only their edge makes the shortest visible
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
    figure.update_layout(barmode="overlay", bargap=0.25, height=120 + LANE_HEIGHT_PX * len(lanes))
    figure.update_layout(uniformtext={"mode": "hide", "minsize": 10})  # text only where it fits
    order = list(lanes)[::-1]
    figure.update_yaxes(
        categoryorder="array", categoryarray=order, tickvals=order, ticktext=[lanes[lane] for lane in order]
    )
    lengths = {lane: length / 1000 for lane, length in lengths_us.items()}
    clip_bars(figure, lengths, [f"{length:,.0f} ms" for length in lengths.values()])
    figure.update_layout(meta={"zooms": True, "whole": max(lengths.values())})
    figure.update_xaxes(title="ms since the step began")
    return styled(figure)
