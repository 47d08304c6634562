"""Heat maps of rank by step."""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ddp_lab.analysis.report.figures import axis_end, styled


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
