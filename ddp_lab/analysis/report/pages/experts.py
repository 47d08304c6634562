"""A mixture of experts on the summary page: who gets how many tokens, step by step."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from ddp_lab.analysis.report.figures import styled

MOST_LANES, MOST_STEPS = 128, 400


def expert_load(record: dict[str, Any] | None) -> pd.DataFrame:
    """What each expert got over its even share: rows by layer and expert, a column a step; empty if it is unknown."""
    loads = (record or {}).get("step_expert_tokens") or []
    return pd.DataFrame({step: relative(load) for step, load in enumerate(loads) if load})


def relative(load: list[list[int]]) -> "pd.Series[float]":
    """What each expert got over its even share, by layer and expert. `load`: as of a step in the run record."""
    shares = {
        (layer, expert): count * len(of_layer) / max(sum(of_layer), 1)
        for layer, of_layer in enumerate(load)
        for expert, count in enumerate(of_layer)
    }
    return pd.Series(shares).rename_axis(["layer", "expert"])


def load_figure(load: pd.DataFrame) -> go.Figure:
    """A heat map of `expert_load`, of the first experts, and of some steps if there are many."""
    by_step = load.iloc[:MOST_LANES, :: -(-load.shape[1] // MOST_STEPS)]
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
