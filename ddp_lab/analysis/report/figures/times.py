"""Times: bars of the parts of a step, heat maps of rank by step; and lines of losses."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ddp_lab.analysis.report.figures import BAR_HEIGHT_PX, COLOURS, LINE_COLOURS, axis_end, clip_bars, styled

PARTS = {
    "compute_ms": ("compute", COLOURS["compute"], ""),
    "exposed_wait_ms": ("exposed: waiting for the last rank", COLOURS["exposed"], "/"),
    "exposed_transfer_ms": ("exposed: transfer", COLOURS["exposed"], ""),
    "exposed_copy_ms": ("exposed memory copies", COLOURS["memory copy"], ""),
    "idle_ms": ("idle", COLOURS["idle"], ""),
}
"""The parts of a step: name, colour and hatching."""
DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")


def parts_figure(table: pd.DataFrame) -> go.Figure:
    """A bar a rank of `table`: the parts of a mean step under the profiler, in ms."""
    figure, names = go.Figure(), [f"rank {rank}" for rank in table["rank"]]
    if table["exposed_wait_ms"].isna().all() and "exposed_ms" in table:  # an incomplete run: the last rank is unknown
        table = table.assign(exposed_transfer_ms=table["exposed_ms"])
    for column, (name, colour, hatching) in PARTS.items():
        if table[column].any():
            figure.add_bar(
                y=names,
                x=table[column],
                name=name,
                orientation="h",
                marker={"color": colour, "pattern": {"shape": hatching}},
                hovertemplate="%{y}: %{x:.1f} ms a step, " + name + "<extra></extra>",
            )
    figure.update_layout(barmode="stack", height=130 + BAR_HEIGHT_PX * len(table))
    figure.update_xaxes(title="ms a step, under the profiler")
    totals = table[[column for column in PARTS if column in table]].sum(axis="columns")
    clip_bars(figure, dict(zip(names, totals, strict=True)), [f"{ms:,.0f} ms" for ms in totals])
    figure.update_yaxes(autorange="reversed")
    return styled(figure)


def loss_figure(records: Mapping[str, dict[str, Any]], unit: str) -> go.Figure:
    """Training loss over optimizer steps. Lines of choices that compute the same lie on top of each other."""
    figure = go.Figure()
    end = axis_end((loss for record in records.values() for loss in record["train_loss"]), 0.95)
    for index, (name, record) in enumerate(records.items()):
        losses = pd.Series(record["train_loss"], dtype=float)
        figure.add_scatter(
            x=losses.index,
            y=losses,
            name=name,
            mode="lines",
            line={"dash": DASHES[index % len(DASHES)], "color": LINE_COLOURS[index % len(LINE_COLOURS)]},
            hovertemplate=f"{name}, step %{{x}}: %{{y:.4f}} {unit}, mean over the global batch<extra></extra>",
        )
        if losses.max() > end:
            mark = {"text": f"▴ {losses.max():,.4g}", "showarrow": False, "bgcolor": "var(--paper)"}
            figure.update_yaxes(range=[0, end])
            figure.add_annotation(x=losses.idxmax(), y=1, yref="y domain", yanchor="top", **mark)
    figure.update_xaxes(title="optimizer step")
    figure.update_yaxes(title=f"training loss, {unit}" if unit else "training loss")
    figure.update_layout(height=360, showlegend=True)
    return styled(figure)


def ranks_figure(table: pd.DataFrame, panels: Mapping[str, str]) -> go.Figure:
    """Two heat maps side by side, in ms.

    Args:
        table: Columns rank and step, and those of the panels.
        panels: Title of each map by its column.
    """
    figure = make_subplots(cols=2, shared_yaxes=True, horizontal_spacing=0.14, subplot_titles=list(panels.values()))
    for place, (column, name) in enumerate(panels.items(), start=1):
        by_step = table.pivot_table(index="rank", columns="step", values=column, dropna=False)
        cut = by_step > (end := axis_end(by_step.to_numpy().ravel()))
        figure.add_heatmap(
            z=by_step.round(3).to_numpy().tolist(),
            **({"zmin": 0, "zmax": end} if cut.any(axis=None) else {}),
            text=by_step.map("{:,.0f}".format).where(cut, "").to_numpy().tolist(),
            texttemplate="%{text}",
            x=[f"{step}" for step in by_step.columns],
            y=by_step.index.tolist(),
            name=name,
            colorscale="Cividis",
            colorbar={"title": "ms", "thickness": 12, "x": 0.44 if place == 1 else 1.01, "xanchor": "left"},
            hovertemplate=f"rank %{{y}}, step %{{x}}: {name} %{{z:.2f}} ms<extra></extra>",
            row=1,
            col=place,
        )
    ranks = table["rank"].nunique()
    figure.update_layout(height=min(900, 160 + 8 * max(ranks, 8)), meta={"narrowest": 560})
    figure.update_xaxes(title="step", type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed", dtick=1 if ranks <= 16 else None)
    figure.update_yaxes(title="rank", col=1)
    figure.update_annotations(font={"size": 13})
    return styled(figure).update_layout(margin={"t": 40})
