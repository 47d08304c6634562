"""The section of the summary page on a mixture of experts: who gets how many tokens, step by step."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from ddp_lab.analysis.report.figures import styled
from ddp_lab.analysis.report.page import Section, drawing

MOST_LANES, MOST_STEPS = 128, 400


def experts_section(record: dict[str, Any] | None) -> list[Section]:
    """None of a run that did not count."""
    loads = (record or {}).get("step_expert_tokens") or []
    steps = {step: load for step, load in enumerate(loads) if load}
    if not steps:
        return []
    by_step = pd.DataFrame({step: relative(load) for step, load in steps.items()})
    highest = by_step.groupby(level="layer").max()
    first, last, most = highest[min(steps)].mean(), highest[max(steps)].mean(), float(highest.to_numpy().max())
    text = (
        "1.00 is an even share of a layer's tokens. The expert that gets most has, on average over layers, "
        f"{first:.2f} of it in step {min(steps)} and {last:.2f} in step {max(steps)}; at most {most:.2f}. "
        "step_expert_tokens in the run record has the counts."
    )
    shown = by_step.iloc[:MOST_LANES, :: -(-by_step.shape[1] // MOST_STEPS)]
    if len(shown) < len(by_step):
        text += f" Drawn: the first {MOST_LANES} experts."
    return [Section("Load of experts", text, figure=drawing(load_figure(shown)))]


def relative(load: list[list[int]]) -> "pd.Series[float]":
    """What each expert got over its even share, by layer and expert. `load`: as of a step in the run record."""
    shares = {
        (layer, expert): count * len(of_layer) / max(sum(of_layer), 1)
        for layer, of_layer in enumerate(load)
        for expert, count in enumerate(of_layer)
    }
    return pd.Series(shares).rename_axis(["layer", "expert"])


def load_figure(by_step: pd.DataFrame) -> go.Figure:
    """A heat map of expert by step. `by_step`: rows by layer and expert, a column a step."""
    figure = go.Figure().add_heatmap(
        z=by_step.round(3).to_numpy().tolist(),
        zmin=0,
        zmax=max(2.0, by_step.quantile(0.99).max()),
        x=[f"{step}" for step in by_step.columns],
        y=[f"layer {layer}, expert {expert}" for layer, expert in by_step.index],
        colorscale="Cividis",
        colorbar={"title": "load", "thickness": 12},
        hovertemplate="%{y}, step %{x}: %{z:.2f} of an even share<extra></extra>",
    )
    figure.update_layout(height=min(900, 160 + 14 * len(by_step)), meta={"narrowest": 560})
    figure.update_xaxes(title="step", type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed")
    return styled(figure)
