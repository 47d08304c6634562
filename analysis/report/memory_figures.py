"""Figures of memory. Sizes are in MiB; a component has the same colour everywhere."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.columns import COMPONENTS, MIB, SHARDABLE
from analysis.metrics.memory import OTHER
from analysis.report.figures import styled

MEMORY_COLOURS = {
    "parameters": "var(--parameters)",
    "gradients": "#CC6677",
    "optimizer_state": "#44AA99",
    "buffers": "#AA4499",
    "model_states": "var(--states)",
    OTHER: "var(--pale)",
    "peak": "var(--pale)",
    "all": "#777777",
}
"""Paul Tol's muted colours, none of which stands for a phase or a kind of time elsewhere."""
MOST_PANELS = 8
"""Ranks that a figure with a panel a rank shows."""
PANEL_PX = 210
BAR_WIDTH = 0.62


def bars(y: Iterable[str], x: Iterable[float], name: str, colour: Any, **more: Any) -> go.Bar:
    marker = {"color": colour}
    return go.Bar(y=list(y), x=list(x), name=name, orientation="h", width=BAR_WIDTH, marker=marker, **more)


def formula_ticks(y: Iterable[str], x: Iterable[float], in_legend: bool) -> go.Scatter:
    """A line across each bar where the formula expects its end."""
    return go.Scatter(
        x=list(x),
        y=list(y),
        mode="markers",
        name="formula, at rest",
        showlegend=in_legend,
        marker={"symbol": "line-ns", "size": 20, "line": {"width": 2.5, "color": "var(--ink)"}},
        hovertemplate="%{y}: %{x:.2f} MiB at rest by the formula<extra></extra>",
        cliponaxis=False,
    )


def labels(y: Iterable[str], x: Iterable[float], text: Iterable[str]) -> go.Scatter:
    """Figures beside the bars."""
    return go.Scatter(
        y=list(y),
        x=list(x),
        text=[f"  {line}" for line in text],
        mode="text",
        textposition="middle right",
        showlegend=False,
        hoverinfo="skip",
        cliponaxis=False,
    )


def memory_by_component_figure(summary: pd.DataFrame) -> go.Figure:
    """A panel a rank: of each component what it holds at rest and at most, and what the formula expects."""
    figure = make_subplots(
        rows=len(summary),
        shared_xaxes=True,
        vertical_spacing=40 / (PANEL_PX * len(summary)),
        subplot_titles=[f"<b>rank {rank}</b>" for rank in summary["rank"]],
    )
    widest = 0.0
    for index, row in enumerate(summary.to_dict("records")):
        place = {"row": index + 1, "col": 1}
        rows = component_rows(row)
        names, first = rows["name"].tolist(), index == 0
        hover = "%{y}: peak in the step %{x:.2f} MiB<extra></extra>"
        colours = rows["colour"]
        peaks = bars(
            names, rows["peak"], "peak in the step", colours, opacity=0.4, showlegend=first, hovertemplate=hover
        )
        figure.add_trace(peaks, **place)
        resting = rows.dropna(subset=["rest"])
        hover = "%{y}: at rest %{x:.2f} MiB<extra></extra>"
        figure.add_trace(
            bars(resting["name"], resting["rest"], "at rest", resting["colour"], showlegend=first, hovertemplate=hover),
            **place,
        )
        expected = rows.dropna(subset=["formula"])
        figure.add_trace(formula_ticks(expected["name"], expected["formula"], first), **place)
        figure.add_trace(labels(names, rows[["peak", "formula"]].max(axis="columns"), rows["text"]), **place)
        widest = max(widest, rows[["peak", "formula"]].max().max())
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(range=[0, widest * 1.3])
    figure.update_xaxes(title="MiB", row=len(summary), col=1)
    figure.update_yaxes(autorange="reversed")
    return roomy(figure, 130 + PANEL_PX * len(summary))


def component_rows(row: Mapping[Any, Any]) -> pd.DataFrame:
    """What `memory_by_component_figure` draws of one rank: columns name, rest, peak, formula (MiB), colour, text."""
    rows: list[dict[str, Any]] = []
    for component, name in {**COMPONENTS, "model_states": "all states"}.items():
        rest, peak = row[f"{component}_bytes"] * MIB, row[f"peak_{component}_bytes"] * MIB
        if component in (*SHARDABLE, "model_states") or peak >= 0.1:  # most models have next to no buffers
            formula = row.get(f"expected_{component}_bytes", float("nan")) * MIB
            colour, text = MEMORY_COLOURS[component], f"{rest:,.1f} MiB, peak {peak:,.1f} MiB"
            rows.append({"name": name, "rest": rest, "peak": peak, "formula": formula, "colour": colour, "text": text})
    total = row["peak_bytes"] * MIB
    text = f"peak {total:,.1f} MiB"
    rows.append({"name": "all allocated", "peak": total, "colour": MEMORY_COLOURS["all"], "text": text})
    return pd.DataFrame(rows)


def memory_by_choice_figure(table: pd.DataFrame) -> go.Figure:
    """A bar a choice: components at rest, the peak behind them, and the formula's value as a line."""
    names, peak = table["choice"].tolist(), table["peak_bytes"] * MIB
    hover = "%{y}: peak in a step %{x:.2f} MiB<extra></extra>"
    figure = go.Figure(bars(names, peak, "peak in a step", MEMORY_COLOURS["peak"], hovertemplate=hover))
    begin = peak * 0
    for component, name in COMPONENTS.items():
        held = table[f"{component}_bytes"] * MIB
        if held.max() >= 0.1:
            hover = f"%{{y}}: {name} at rest %{{customdata:.2f}} MiB<extra></extra>"  # x is where the bar ends
            colour = MEMORY_COLOURS[component]
            figure.add_trace(bars(names, held, name, colour, base=begin, customdata=held, hovertemplate=hover))
        begin = begin + held
    expected = table["expected_model_states_bytes"] * MIB
    figure.add_trace(formula_ticks(names, expected, in_legend=True))
    text = [f"{rest:,.1f} MiB, peak {most:,.1f} MiB" for rest, most in zip(begin, peak, strict=True)]
    ends = pd.concat([peak, expected], axis="columns").max(axis="columns")
    figure.add_trace(labels(names, ends, text))
    figure.update_layout(barmode="overlay", height=140 + 34 * len(table), meta={"narrowest": 560})
    figure.update_xaxes(title="MiB, of the rank that has most", range=[0, ends.max() * 1.3])
    figure.update_yaxes(autorange="reversed")
    return styled(figure)


def roomy(figure: go.Figure, height: int) -> go.Figure:
    """Styled, with the titles of panels to the left; narrower than their labels need, it scrolls."""
    figure.update_layout(height=height, meta={"narrowest": 560})
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    styled(figure)
    above = {"yref": "paper", "yanchor": "bottom", "y": 1 + 30 / (height - 130), "xref": "paper"}
    return figure.update_layout(margin={"t": 75}, legend=above)
