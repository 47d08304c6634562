"""What ranks sent to each other: time and bytes by kind of collective."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.collectives import KINDS
from analysis.columns import MIB
from analysis.report.figures import styled

KIND_COLOURS = dict(
    zip(
        KINDS,
        ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C564B", "#8C8C8C"),
        strict=True,
    )
)


def kinds_seen(summary: pd.DataFrame) -> list[str]:
    """The kinds of which a rank made at least one call."""
    return [kind for kind in KINDS if summary[f"{kind}_calls_per_step"].any()]


def collectives_figure(summary: pd.DataFrame) -> go.Figure:
    """A bar a rank, twice: time and payload of one step, by kind."""
    figure = make_subplots(cols=2, shared_yaxes=True, horizontal_spacing=0.05)
    ranks = [f"rank {rank}" for rank in summary["rank"]]
    for kind in kinds_seen(summary):
        for place, column, scale, unit in ((1, "ms", 1.0, "ms"), (2, "bytes", MIB, "MiB")):
            figure.add_bar(
                y=ranks,
                x=summary[f"{kind}_{column}_per_step"] * scale,
                orientation="h",
                name=KINDS[kind],
                legendgroup=kind,
                showlegend=place == 1,
                marker={"color": KIND_COLOURS[kind]},
                hovertemplate=f"%{{y}}: {KINDS[kind]} %{{x:.2f}} {unit} a step<extra></extra>",
                row=1,
                col=place,
            )
    figure.update_layout(barmode="stack", height=130 + 30 * len(ranks))
    figure.update_xaxes(title="ms a step (sum of durations, hidden or not)", row=1, col=1)
    figure.update_xaxes(title="MiB a step (payload)", row=1, col=2)
    figure.update_yaxes(autorange="reversed")
    return styled(figure)
