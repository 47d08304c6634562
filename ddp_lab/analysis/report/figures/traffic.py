"""What ranks send: calls, time or payload by kind of collective."""

from collections.abc import Iterable, Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ddp_lab.analysis.columns import MIB, kinds_run
from ddp_lab.analysis.report.figures import BAR_HEIGHT_PX, COLOURS, styled
from ddp_lab.analysis.traces.collectives import KINDS

HATCHING = dict(zip(KINDS, ("", "/", "x", "\\", ".", "|", "-", "+", ""), strict=True))
"""All kinds have the colour of communication, so hatching tells them apart; `other` is grey."""
PANELS = {
    "calls": ("calls a step", 1.0),
    "ms": ("ms a step, hidden or not", 1.0),
    "bytes": ("MiB a step (payload)", MIB),
}


def traffic_figure(names: Iterable[str], table: pd.DataFrame, panels: Sequence[str]) -> go.Figure:
    """A bar a row of `table` in each panel, stacked by kind of collective.

    Args:
        names: Of the rows.
        panels: Two of `PANELS`.
    """
    figure = make_subplots(cols=len(panels), shared_yaxes=True, horizontal_spacing=0.05)
    for kind in kinds_run(table):
        pattern = {"shape": HATCHING[kind], "size": 8, "solidity": 0.25, "fgopacity": 0.6, "fgcolor": "black"}
        for place, panel in enumerate(panels, start=1):
            title, scale = PANELS[panel]
            figure.add_bar(
                y=list(names),
                x=table[f"{kind}_{panel}_per_step"] * scale,
                orientation="h",
                name=KINDS[kind],
                legendgroup=kind,
                showlegend=place == 1,
                marker={
                    "color": COLOURS["other compute" if kind == "other" else "communication"],
                    "pattern": pattern | {"fillmode": "overlay"},
                },
                hovertemplate=f"%{{y}}: {KINDS[kind]} %{{x:,.3~f}} {title}<extra></extra>",
                row=1,
                col=place,
            )
            figure.update_xaxes(title=title, row=1, col=place)
    figure.update_layout(barmode="stack", height=130 + BAR_HEIGHT_PX * len(table))
    figure.update_yaxes(autorange="reversed")
    return styled(figure)
