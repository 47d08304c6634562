"""Figures with a bar, a lane or a line a choice (or a run): step times, parts of a step, traffic, losses."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.columns import MIB
from analysis.comparison.compare import IS_REFERENCE, Traced, kinds_run, timed_steps_ms
from analysis.report.collective_figure import kind_marker
from analysis.report.exposure_section import PARTS
from analysis.report.figures import COLOURS, LANE_HEIGHT_PX, LANE_NAMES, styled
from analysis.report.lanes import (
    MOST_INTERVALS,
    bounds,
    compute_lane,
    gap_to_close,
    longest,
    merged,
)
from analysis.traces.collectives import KINDS
from analysis.traces.intervals import Intervals, clip

VERDICT_SYMBOLS = {"faster": "triangle-left", "slower": "triangle-right", "no difference seen": "circle"}
BAR_HEIGHT_PX = 28
LINE_COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#999999")
"""Paul Tol's bright colours, of lines that stand for a choice each."""
DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")


def step_time_figure(table: pd.DataFrame) -> go.Figure:
    """Median step time a choice, with the middle half of the steps as whisker; beside it the ratio to the reference,
    with its interval, of the choices that have one."""
    judged = table.dropna(subset=["paired_ratio"])
    panels = {"cols": 2, "shared_yaxes": True, "horizontal_spacing": 0.04, "column_widths": [0.58, 0.42]}
    figure = make_subplots(**panels if len(judged) else {})
    median = table["step_time_ms_median"]
    figure.add_bar(
        y=table["choice"],
        x=median,
        error_x=whisker(median, table["step_time_ms_p25"], table["step_time_ms_p75"]),
        orientation="h",
        marker={"color": COLOURS["compute"]},
        customdata=table[["timed_steps"]],
        hovertemplate="%{y}: %{x:.1f} ms, median of %{customdata[0]} steps on rank 0, outside the profiler"
        "<extra></extra>",
        row=1,
        col=1,
    )
    figure.update_xaxes(title="step time, ms (whiskers: p25 to p75)", rangemode="tozero", row=1, col=1)
    if len(judged):
        draw_ratios(figure, judged, table.loc[table["verdict"] == IS_REFERENCE, "choice"].iloc[0])
    figure.update_layout(height=130 + BAR_HEIGHT_PX * len(table), showlegend=False)
    figure.update_yaxes(autorange="reversed")
    return styled(figure)


def draw_ratios(figure: go.Figure, judged: pd.DataFrame, reference: str) -> None:
    """The second panel of `step_time_figure`."""
    ratio = judged["paired_ratio"]
    symbols = judged["verdict"].map(VERDICT_SYMBOLS).fillna("circle-open")
    figure.add_scatter(
        y=judged["choice"],
        x=ratio,
        error_x=whisker(ratio, judged["paired_ratio_low"], judged["paired_ratio_high"]),
        mode="markers",
        marker={"color": "var(--ink)", "size": 9, "symbol": symbols},
        customdata=judged[["paired_ratio_low", "paired_ratio_high", "pairs", "verdict"]],
        hovertemplate="%{y}: %{customdata[3]}, %{x:.3f} times the reference's step time (95 % interval "
        "%{customdata[0]:.3f} to %{customdata[1]:.3f}, %{customdata[2]} pairs of steps)<extra></extra>",
        row=1,
        col=2,
    )
    figure.add_vline(x=1, line={"color": COLOURS["other compute"], "dash": "dash"}, row=1, col=2)
    figure.add_annotation(x=1, y=reference, text="reference", showarrow=False, bgcolor="var(--paper)", row=1, col=2)
    figure.update_xaxes(title="step time over the reference's, × (95 % interval)", row=1, col=2)


def whisker(middle: pd.Series, low: pd.Series, high: pd.Series) -> dict[str, Any]:
    return {"type": "data", "symmetric": False, "array": high - middle, "arrayminus": middle - low}


def parts_figure(names: pd.Series, table: pd.DataFrame) -> go.Figure:
    """A bar a choice of the parts of its mean step under the profiler, in ms; they add up to the step."""
    figure = go.Figure()
    for column, (name, colour, hatching) in PARTS.items():
        if table[column].any():
            figure.add_bar(
                y=names,
                x=table[column],
                name=name,
                orientation="h",
                marker={"color": colour, "pattern": {"shape": hatching}},
                hovertemplate="%{y}: %{x:.1f} ms a step, " + name + " (mean over ranks and profiled steps)"
                "<extra></extra>",
            )
    figure.update_layout(barmode="stack", height=130 + BAR_HEIGHT_PX * len(table))
    figure.update_xaxes(title="ms a step, under the profiler")
    figure.update_yaxes(autorange="reversed")
    return styled(figure)


def traffic_figure(table: pd.DataFrame) -> go.Figure:
    """A bar a choice, twice: calls and payload of one step, by kind of collective."""
    figure = make_subplots(cols=2, shared_yaxes=True, horizontal_spacing=0.05)
    for kind in kinds_run(table):
        for place, column, scale, unit in ((1, "calls", 1.0, "calls"), (2, "bytes", MIB, "MiB")):
            figure.add_bar(
                y=table["choice"],
                x=table[f"{kind}_{column}_per_step"] * scale,
                orientation="h",
                name=KINDS[kind],
                legendgroup=kind,
                showlegend=place == 1,
                marker=kind_marker(kind),
                hovertemplate=f"%{{y}}: {KINDS[kind]} %{{x:,.3~f}} {unit} a step, counted in the trace<extra></extra>",
                row=1,
                col=place,
            )
    figure.update_layout(barmode="stack", height=130 + BAR_HEIGHT_PX * len(table))
    figure.update_xaxes(title="calls a step, mean over ranks", row=1, col=1)
    figure.update_xaxes(title="MiB a step (payload), mean over ranks", row=1, col=2)
    figure.update_yaxes(autorange="reversed")
    return styled(figure)


def lanes_by_choice_figure(traced: Mapping[str, Traced]) -> go.Figure:
    """One step of one rank of each choice on one time axis, which begins where each step does: its compute lane, and
    under that the moments at which at least one collective was under way."""
    segments: dict[str, list[tuple[str, float, float]]] = {name: [] for name in COLOURS}
    lanes: list[str] = []
    shown = [(kept.timeline, kept.step) for kept in traced.values()]
    gap = gap_to_close(shown)
    for choice, kept in traced.items():
        start, end = bounds(kept.timeline, kept.step)
        drawn: list[tuple[str, str, Intervals]] = [
            (choice, name, intervals) for name, intervals in compute_lane(kept.timeline, start, end, gap).items()
        ]
        lane, sent = f"{choice}  collectives", clip(kept.timeline.intervals("communication"), start, end)
        drawn.append((lane, "communication", merged(sent, gap, MOST_INTERVALS // len(traced))))
        lanes += [choice, lane]
        for where, name, intervals in drawn:
            segments[name] += [(where, first - start, last - start) for first, last in intervals]
    figure = go.Figure()
    for name, found in segments.items():
        if found:
            frame = pd.DataFrame(found, columns=["lane", "start", "end"])
            figure.add_bar(
                y=frame["lane"],
                base=(frame["start"] / 1000).round(3),
                x=((frame["end"] - frame["start"]) / 1000).round(3),
                name=LANE_NAMES.get(name, name),
                orientation="h",
                marker={"color": COLOURS[name], "line": {"width": 0}},
                customdata=(frame["end"] - frame["start"]) / 1000,  # x is where the bar ends
                hovertemplate="%{y}, %{fullData.name}: %{customdata:.2f} ms, from %{base:.2f} ms<extra></extra>",
            )
    height = 120 + LANE_HEIGHT_PX * len(lanes)
    figure.update_layout(barmode="overlay", bargap=0.25, height=height, meta={"zooms": True})
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], title=None)
    figure.update_xaxes(title="ms since the step began", range=[0, longest(shown) / 1000])
    return styled(figure)


def loss_figure(records: Mapping[str, dict[str, Any]]) -> go.Figure:
    """Training loss over optimizer steps. Choices that compute the same lie on top of each other."""
    losses = {name: pd.Series(record["train_loss"], dtype=float) for name, record in records.items()}
    return lines_figure(losses, "training loss, nats", "%{y:.4f} nats, mean over the global batch")


def step_times_figure(records: Mapping[str, dict[str, Any]]) -> go.Figure:
    """Step time over optimizer steps; a gap where the profiler ran."""
    times = {name: timed_steps_ms(record) for name, record in records.items()}
    gapped = {name: series.reindex(range(1, len(records[name]["step_time_s"]))) for name, series in times.items()}
    return lines_figure(gapped, "step time, ms", "%{y:.1f} ms on rank 0, outside the profiler").update_yaxes(
        rangemode="tozero"
    )


def lines_figure(lines: Mapping[str, pd.Series], title: str, shown: str) -> go.Figure:
    """A line a choice over optimizer steps, by which each series is indexed."""
    figure = go.Figure()
    for index, (name, series) in enumerate(lines.items()):
        figure.add_scatter(
            x=series.index,
            y=series,
            name=name,
            mode="lines",
            line={"dash": DASHES[index % len(DASHES)], "color": LINE_COLOURS[index % len(LINE_COLOURS)]},
            hovertemplate=f"{name}, step %{{x}}: {shown}<extra></extra>",
        )
    figure.update_xaxes(title="optimizer step")
    figure.update_yaxes(title=title)
    figure.update_layout(height=360, showlegend=True)
    return styled(figure)
