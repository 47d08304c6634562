"""Who waits for whom: a heat map of the ranks on the mesh for each dimension."""

from math import prod

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ddp_lab.analysis.mesh import Mesh, coordinates, in_order
from ddp_lab.analysis.report.figures import styled

CELL_PX = 34
MOST_LABELLED = 64
"""Ranks, up to which each cell shows its number."""


def mesh_waits_figure(waits: pd.DataFrame, mesh: Mesh) -> go.Figure:
    """A panel for each dimension. The innermost dimension of the mesh goes from left to right, the others downwards.

    Args:
        waits: The table of `metrics.dimensions.waits`.
    """
    names = in_order(mesh, waits["dimension"].tolist())
    inner, across = list(mesh.items())[-1]
    places = [coordinates(mesh, rank) for rank in range(prod(mesh.values()))]
    rows = [", ".join(f"{name} {at}" for name, at in place.items() if name != inner) for place in places[::across]]
    figure = make_subplots(
        cols=len(names),
        shared_yaxes=True,
        horizontal_spacing=0.06,
        subplot_titles=[f"in collectives of {name or 'other groups'}" for name in names],
    )
    for column, name in enumerate(names, start=1):
        found = waits[waits["dimension"] == name].set_index("rank")
        ranks = [list(range(first, first + across)) for first in range(0, len(places), across)]
        figure.add_heatmap(
            z=[[_value(found, rank) for rank in row] for row in ranks],
            text=[[_sentence(found, rank) for rank in row] for row in ranks],
            x=[f"{inner} {at}" for at in range(across)],
            y=rows,
            name=name,
            coloraxis="coloraxis",
            texttemplate="%{z:.1f}" if len(places) <= MOST_LABELLED else None,
            xgap=1,
            ygap=1,
            hoverongaps=False,
            hovertemplate="%{text}<extra>%{y} %{x}</extra>",
            row=1,
            col=column,
        )
    figure.update_layout(
        height=min(900, 150 + CELL_PX * max(len(rows), 3)),
        coloraxis={"colorscale": "Cividis", "cmin": 0, "colorbar": {"title": "ms/step", "thickness": 12}},
        meta={"narrowest": 260 * len(names)},
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure.update_annotations(font={"size": 13})
    return styled(figure).update_layout(margin={"t": 40})


def _value(waits: pd.DataFrame, rank: int) -> float | None:
    return round(float(waits["wait_ms"][rank]), 3) if rank in waits.index else None


def _sentence(waits: pd.DataFrame, rank: int) -> str:
    if rank not in waits.index:
        return ""
    row = waits.loc[rank]
    most = f", {row['late_ms']:.2f} of them for rank {row['late_rank']:.0f}" if row["late_ms"] > 0 else ""
    return f"rank {rank} waits {row['wait_ms']:.2f} ms a step{most}"
