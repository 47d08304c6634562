"""What ranks sent to each other: time and bytes by kind of collective."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.columns import MIB
from analysis.report.figures import COLOURS, styled
from analysis.traces.collectives import KINDS

KIND_PATTERNS = {
    kind: {"shape": shape, "size": 8, "solidity": 0.25, "fgopacity": 0.6}
    for kind, shape in zip(KINDS, ("", "/", "x", "\\", ".", "|", "-", "+", ""), strict=True)
}
"""Hatching: all kinds are communication, so they share its colour; `other` is grey."""


def kind_marker(kind: str) -> dict[str, Any]:
    """How bars of a kind look."""
    colour = COLOURS["other compute" if kind == "other" else "communication"]
    return {"color": colour, "pattern": KIND_PATTERNS[kind] | {"fillmode": "overlay", "fgcolor": "black"}}


def kinds_seen(summary: pd.DataFrame) -> list[str]:
    """The kinds of which a rank made at least one call."""
    return [kind for kind in KINDS if summary[f"{kind}_calls_per_step"].any()]


def collectives_figure(summary: pd.DataFrame) -> go.Figure:
    """A bar a rank, twice: time and payload of one step, by kind."""
    panels = (("ms", 1.0, "ms a step, hidden or not"), ("bytes", MIB, "MiB a step, payload"))
    figure = make_subplots(rows=len(panels), vertical_spacing=60 / (130 + 60 * len(summary)))
    for kind in kinds_seen(summary):
        for place, (column, scale, title) in enumerate(panels, start=1):
            figure.add_bar(
                y=[f"rank {rank}" for rank in summary["rank"]],
                x=summary[f"{kind}_{column}_per_step"] * scale,
                orientation="h",
                name=KINDS[kind],
                legendgroup=kind,
                showlegend=place == 1,
                marker=kind_marker(kind),
                hovertemplate=f"%{{y}}: {KINDS[kind]} %{{x:.2f}} {title}<extra></extra>",
                row=place,
                col=1,
            )
            figure.update_xaxes(title=title, row=place, col=1)
    figure.update_layout(barmode="stack", height=200 + 60 * len(summary))
    figure.update_yaxes(autorange="reversed")
    return styled(figure)
