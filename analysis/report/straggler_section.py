"""Who was late: a sentence, a table by rank, and rank x step where there are enough steps."""

import pandas as pd
import plotly.graph_objects as go

from analysis.columns import EXPOSURE_COLUMNS, Column
from analysis.metrics.exposure import Exposure
from analysis.metrics.stragglers import by_rank, stragglers, verdict
from analysis.report.figures import styled
from analysis.report.page import Section, drawing, table

LATE_COLUMNS = {
    "rank": EXPOSURE_COLUMNS["rank"],
    "collectives": Column("collectives", "", "collectives that could be matched over ranks"),
    "last_pct": Column("arrives last", "%", "share of these in which the rank arrived last"),
    "lateness_ms": Column("lateness", "ms", "the most by which it then was later than the median of the others", 1, 2),
    "costs_ms": Column("costs others", "ms/step", "exposed waiting of all other ranks in these collectives", 1, 2),
    "offset_ms": Column("clock", "ms", "how far the rank's clock is ahead of the first rank's; taken off", 1, 3),
    "residual_ms": Column("residual", "ms", "half of the collectives end within this of each other after that", 1, 3),
}
ENOUGH_STEPS = 4
"""Analysed steps from which on a heat map says more than the table."""


def straggler_section(exposure: Exposure) -> Section:
    late = stragglers(exposure)
    heading = "Who was late"
    if not late["collectives"].any():
        return Section(heading, "Unknown: no collective could be matched over ranks.")
    ranks = by_rank(late)
    columns = [name for name in LATE_COLUMNS if name in ranks or name in exposure.clocks]
    by_chance = 100 * late["last"].sum() / late["collectives"].sum()
    text = verdict(exposure, ranks)
    text += f"Of ranks that are alike, each arrives last in {by_chance:.0f} %. stragglers.csv has every step."
    return Section(
        heading,
        text,
        table=table("late", ranks.merge(exposure.clocks, on="rank")[columns], LATE_COLUMNS),
        figure=drawing(straggler_figure(late)) if late["step"].nunique() >= ENOUGH_STEPS else None,
    )


def straggler_figure(late: pd.DataFrame) -> go.Figure:
    """Rank x step: by how much the rank was late at most, where it arrived last."""
    lateness, last, costs = (
        late.pivot(index="rank", columns="step", values=name) for name in ("lateness_ms", "last", "costs_ms")
    )
    figure = go.Figure(
        go.Heatmap(
            z=lateness.to_numpy().tolist(),
            x=[str(step) for step in lateness.columns],
            y=[f"rank {rank}" for rank in lateness.index],
            customdata=[list(zip(*pair, strict=True)) for pair in zip(last.to_numpy(), costs.to_numpy(), strict=True)],
            colorscale="Cividis",
            zmin=0,
            colorbar={"title": "ms late"},
            xgap=1,
            ygap=1,
            hovertemplate="%{y}, step %{x}: up to %{z:.2f} ms late, last in %{customdata[0]} collectives; "
            "the others wait %{customdata[1]:.2f} ms<extra></extra>",
        )
    )
    figure.update_layout(height=140 + 24 * len(lateness))
    figure.update_xaxes(title="optimizer step", type="category")
    figure.update_yaxes(autorange="reversed")
    return styled(figure)
