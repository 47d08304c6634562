"""Memory over one optimizer step, a panel a rank."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.columns import COMPONENTS, MIB
from analysis.metrics.memory import OTHER, memory_timeline
from analysis.report.figures import COLOURS, literal
from analysis.report.memory_figures import MEMORY_COLOURS, roomy

PANEL_PX = 240
PHASE_COLOURS = {**COLOURS, "gradient_sync": COLOURS["communication"]}


def memory_timeline_figure(record: dict[str, Any] | None, summary: pd.DataFrame) -> go.Figure | None:
    """Memory over the recorded step, a panel a rank; None where no rank has a timeline."""
    found = [(row, memory_timeline(record, row["rank"])) for row in summary.to_dict("records")]
    panels = [(row, timeline) for row, timeline in found if timeline]
    if not panels:
        return None
    figure = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=False,
        vertical_spacing=55 / (PANEL_PX * len(panels)),
        subplot_titles=[" "] * len(panels),
    )
    last = max(frame["ms"].iloc[-1] for _, (frame, _) in panels)
    for index, (row, (frame, phases)) in enumerate(panels):
        place = {"row": index + 1, "col": 1}
        for component, label in {**COMPONENTS, OTHER: OTHER}.items():
            if not frame[component].any():
                continue
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
    figure.update_xaxes(title="ms since the step began, sampling taken out", row=len(panels), col=1)
    figure.update_layout(uniformtext={"mode": "hide", "minsize": 10})
    return roomy(figure, 130 + PANEL_PX * len(panels))


def draw_phases(figure: go.Figure, phases: pd.DataFrame, top: float, place: dict[str, int]) -> None:
    """A strip above the curves: which part of the step it was, with names where there is room."""
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
