"""Memory in MiB: components beside peak and formula, and memory over one step."""

from collections.abc import Iterable
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ddp_lab.analysis.columns import COLUMNS, COMPONENTS, MIB
from ddp_lab.analysis.metrics.memory import COMMUNICATION, OTHER, memory_timeline
from ddp_lab.analysis.report.figures import COLOURS, MEMORY_COLOURS, clip_bars, literal, styled

MOST_PANELS = 8
"""Ranks in a figure with a panel a rank."""
PANEL_PX = 240
PHASE_COLOURS = {**COLOURS, "gradient_sync": COLOURS["communication"]}


def memory_figure(names: Iterable[str], table: pd.DataFrame) -> go.Figure:
    """A bar a row of `table`: components at rest, the peak behind them, and the formula's value as a line."""
    names = list(names)
    peak, expected = table["peak_bytes"] * MIB, table["expected_model_states_bytes"] * MIB
    hover = "%{y}: peak in a step %{x:.2f} MiB<extra></extra>"
    figure = go.Figure(bars(names, peak, "peak in a step", MEMORY_COLOURS["peak"], hovertemplate=hover))
    begin = peak * 0
    for component, label in COMPONENTS.items():
        at_rest = table[f"{component}_bytes"] * MIB
        if at_rest.max() >= 0.1:  # most models have almost no buffers
            hover = f"%{{y}}: {label} at rest %{{customdata:.2f}} MiB<extra></extra>"  # x is where the bar ends
            colour = MEMORY_COLOURS[component]
            figure.add_trace(bars(names, at_rest, label, colour, base=begin, customdata=at_rest, hovertemplate=hover))
        begin = begin + at_rest
    # the formula
    figure.add_scatter(
        x=expected,
        y=names,
        mode="markers",
        name="formula, at rest",
        marker={"symbol": "line-ns", "size": 20, "line": {"width": 2.5, "color": "var(--ink)"}},
        hovertemplate="%{y}: %{x:.2f} MiB at rest by the formula<extra></extra>",
    )
    # figures behind the bars
    ends = pd.concat([peak, expected], axis="columns").max(axis="columns")
    texts = [f"{states:,.1f} MiB, peak {most:,.1f} MiB" for states, most in zip(begin, peak, strict=True)]
    end = clip_bars(
        figure, dict(zip(names, ends, strict=True)), texts, room=1.55
    )  # printed, texts are as wide as half a bar
    figure.add_scatter(
        x=ends.where(ends <= end),
        y=names,
        text=[f"  {text}" for text in texts],
        mode="text",
        textposition="middle right",
        showlegend=False,
        hoverinfo="skip",
        cliponaxis=False,
    )
    figure.update_layout(barmode="overlay", height=140 + 34 * len(table), meta={"narrowest": 560})
    figure.update_xaxes(title="MiB")
    figure.update_yaxes(autorange="reversed")
    return styled(figure)


def where_figure(parts: pd.DataFrame) -> go.Figure:
    """A bar a row of `parts` (`metrics.memory.memory_parts`): what memory went to at the peak."""
    names = [f"rank {rank}" for rank in parts["rank"]]
    figure = go.Figure(
        [
            bars(names, parts[name] * MIB, column.label, MEMORY_COLOURS[name])
            for name, column in COLUMNS["where"].items()
            if name in MEMORY_COLOURS and (parts[name] * MIB).max() >= 0.1
        ]
    )
    figure.update_layout(barmode="stack", height=140 + 34 * len(parts))
    figure.update_xaxes(title="MiB").update_yaxes(autorange="reversed")
    return styled(figure)


def bars(y: Iterable[str], x: Iterable[float], name: str, colour: str, **more: Any) -> go.Bar:
    return go.Bar(y=list(y), x=list(x), name=name, orientation="h", width=0.62, marker={"color": colour}, **more)


def memory_timeline_figure(record: dict[str, Any] | None, summary: pd.DataFrame) -> go.Figure | None:
    """Memory over the recorded step, a panel a rank; None if no rank has a timeline."""
    timelines = [(row, memory_timeline(record, row["rank"])) for row in summary.to_dict("records")]
    panels = [(row, timeline) for row, timeline in timelines if timeline]
    if not panels:
        return None
    figure = make_subplots(
        rows=len(panels), vertical_spacing=55 / (PANEL_PX * len(panels)), subplot_titles=[" "] * len(panels)
    )
    for index, (row, (frame, phases)) in enumerate(panels):
        # components
        place, last = {"row": index + 1, "col": 1}, frame["ms"].iloc[-1]
        for component, label in {**COMPONENTS, COMMUNICATION: "communication buffers", OTHER: OTHER}.items():
            if frame[component].fillna(0).any():
                figure.add_scatter(
                    x=frame["ms"],
                    y=(frame[component] * MIB).round(3),
                    name=label,
                    legendgroup=component,
                    showlegend=index == 0,
                    stackgroup="memory",
                    mode="lines",
                    line={"width": 0.5, "color": MEMORY_COLOURS[component]},
                    fillcolor=MEMORY_COLOURS[component],
                    customdata=frame["where"].map(literal),
                    hovertemplate=f"{label}: %{{y:.2f}} MiB, at %{{x:.1f}} ms<extra>%{{customdata}}</extra>",
                    **place,
                )
        # phases, the formula and the peak
        top, expected = frame["total"].max() * MIB, row["expected_model_states_bytes"] * MIB
        draw_phases(figure, phases, max(top, expected), place)
        figure.add_scatter(
            x=[0, last],
            y=[expected, expected],
            mode="lines",
            name="model states at rest by the formula",
            showlegend=index == 0,
            line={"color": "var(--ink)", "dash": "dash", "width": 1.5},
            hovertemplate=f"formula, at rest: {expected:.2f} MiB<extra></extra>",
            **place,
        )
        peak = frame.iloc[int(frame["total"].to_numpy().argmax())]
        figure.add_scatter(
            x=[peak["ms"]],
            y=[top],
            mode="markers",
            marker={"color": "var(--ink)", "size": 8, "symbol": "triangle-down"},
            showlegend=False,
            hovertemplate=f"peak: {top:.2f} MiB<extra>{literal(peak['where'])}</extra>",
            **place,
        )
        title = literal(f"peak {top:,.1f} MiB in {row['peak_phase']}, at {peak['ms']:,.0f} ms")
        figure.layout.annotations[index].text = f"<b>rank {row['rank']}</b>: {title}"
        figure.update_yaxes(range=[0, max(top, expected) * 1.2], title="MiB", **place)
        figure.update_xaxes(range=[0, last], **place)
    # axes and legend
    figure.update_xaxes(title="ms since the step began, without the time of sampling", row=len(panels), col=1)
    height = 130 + PANEL_PX * len(panels)
    figure.update_layout(height=height, meta={"narrowest": 560}, uniformtext={"mode": "hide", "minsize": 10})
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    above = {"yref": "paper", "yanchor": "bottom", "y": 1 + 30 / (height - 130), "xref": "paper"}
    return styled(figure).update_layout(margin={"t": 75}, legend=above)


def draw_phases(figure: go.Figure, phases: pd.DataFrame, top: float, place: dict[str, int]) -> None:
    """A strip above the curves that shows the part of the step, with names if they fit."""
    for name, spans in phases.groupby("name", sort=False):
        shown = str(name).replace("_", " ")
        figure.add_bar(
            x=spans["end_ms"] - spans["start_ms"],
            base=spans["start_ms"],
            y=[top * 1.12] * len(spans),
            width=top * 0.1,
            orientation="h",
            name=shown,
            showlegend=False,
            text=[shown] * len(spans),
            textposition="inside",
            insidetextanchor="middle",
            marker={"color": PHASE_COLOURS[str(name)], "line": {"width": 0}},
            hovertemplate=f"{shown}: from %{{base:.1f}} to %{{x:.1f}} ms<extra></extra>",
            **place,
        )
