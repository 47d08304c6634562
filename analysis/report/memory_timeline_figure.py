"""Memory over one optimizer step, a panel a rank."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.columns import COMPONENTS, MIB
from analysis.memory import OTHER, memory_timeline
from analysis.report.figures import COLOURS
from analysis.report.memory_figures import MEMORY_COLOURS, MOST_RANKS, roomy

PHASE_COLOURS = {**COLOURS, "gradient_sync": COLOURS["exposed"]}


def memory_timeline_figure(record: dict[str, Any] | None, summary: pd.DataFrame) -> go.Figure | None:
    """Memory over the recorded step, a panel a rank; None where no rank has a timeline."""
    found = [(row, memory_timeline(record, row["rank"])) for row in summary.head(MOST_RANKS).to_dict("records")]
    panels = [(row, timeline) for row, timeline in found if timeline]
    if not panels:
        return None
    figure = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=False,
        vertical_spacing=min(0.12, 0.4 / len(panels)),
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
                customdata=frame["where"],
                hovertemplate=f"{label}: %{{y:.2f}} MiB, at %{{x:.1f}} ms<extra>%{{customdata}}</extra>",
                **place,
            )
        top, expected = frame["total"].max() * MIB, row["expected_model_states_bytes"] * MIB
        draw_phases(figure, phases, max(top, expected), index == 0, place)
        figure.add_scatter(
            x=[0, last],
            y=[expected, expected],
            mode="lines",
            name="model states at rest by the formula",
            showlegend=index == 0,
            line={"color": "black", "dash": "dash", "width": 1.5},
            hovertemplate=f"formula, at rest: {expected:.2f} MiB<extra></extra>",
            **place,
        )
        peak = frame.iloc[int(frame["total"].to_numpy().argmax())]
        figure.add_scatter(
            x=[peak["ms"]],
            y=[top],
            mode="markers",
            marker={"color": "black", "size": 8, "symbol": "triangle-down"},
            showlegend=False,
            hovertemplate=f"peak: {top:.2f} MiB<extra>{peak['where']}</extra>",
            **place,
        )
        title = f"<b>rank {row['rank']}</b>: peak {top:,.1f} MiB in {row['peak_phase']}, at {peak['ms']:,.0f} ms"
        figure.layout.annotations[index].update(text=title, x=0, xanchor="left", font={"size": 13})
        figure.update_yaxes(range=[0, max(top, expected) * 1.2], title="MiB", **place)
        figure.update_xaxes(range=[0, last], **place)
    figure.update_xaxes(title="ms since the step began, without the time that sampling took", row=len(panels), col=1)
    figure.update_layout(
        legend2={"orientation": "h", "yanchor": "bottom", "y": 1 + 24 / (260 * len(panels)), "x": 0},
        uniformtext={"mode": "hide", "minsize": 10},
    )
    roomy(figure, 120 + 260 * len(panels))
    figure.update_layout(margin={"t": 100}, legend={"y": 1 + 48 / (260 * len(panels))})
    return figure


def draw_phases(figure: go.Figure, phases: pd.DataFrame, top: float, first: bool, place: dict[str, int]) -> None:
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
            legendgroup=name,
            legend="legend2",
            showlegend=first,
            text=[shown] * len(spans),
            textposition="inside",
            insidetextanchor="middle",
            marker={"color": PHASE_COLOURS[str(name)], "line": {"width": 0}},
            hovertemplate=f"{shown}: %{{x:.1f}} ms, from %{{base:.1f}} ms<extra></extra>",
            **place,
        )
