"""The part of a summary page on exposed communication: how long, of which collective, and who was late."""

import pandas as pd
import plotly.graph_objects as go

from analysis.collectives import KINDS
from analysis.columns import COLLECTIVE_COLUMNS, EXPOSURE_COLUMNS, Column
from analysis.exposure import Exposure
from analysis.report.figures import COLOURS, styled
from analysis.report.many_ranks import representatives
from analysis.report.page import Section, drawing, table

PARTS = {
    "compute_ms": ("compute", COLOURS["compute"]),
    "exposed_wait_ms": ("exposed: waiting for the last rank", COLOURS["communication"]),
    "exposed_transfer_ms": ("exposed: transfer", COLOURS["exposed"]),
    "exposed_copy_ms": ("exposed memory copies", COLOURS["memory copy"]),
    "idle_ms": ("idle", COLOURS["idle"]),
}
SHOWN = 20
LATE_COLUMNS = {
    "rank": EXPOSURE_COLUMNS["rank"],
    "last_pct": Column("arrives last", "%", "share of the collectives in which the rank arrived last"),
    "costs_ms": Column("costs others", "ms/step", "exposed waiting of all other ranks in these collectives", 1, 2),
    "offset_ms": Column("clock", "ms", "how far the rank's clock is ahead of the first rank's; taken off", 1, 3),
    "residual_ms": Column("residual", "ms", "half of the collectives end within this of each other after that", 1, 3),
}
PLACE_COLUMNS = {
    **{name: COLLECTIVE_COLUMNS[name] for name in ("sequence", "kind", "bytes", "after_backward_ms")},
    **{name: COLLECTIVE_COLUMNS[name] for name in ("duration_ms", "wait_ms", "transfer_ms", "exposed_ms")},
    "late_rank": Column("last, mostly", "", "rank that arrived last most often"),
    **{name: COLLECTIVE_COLUMNS[name] for name in ("algbw_gbps", "busbw_gbps")},
}


def exposure_sections(exposure: Exposure) -> list[Section]:
    by_rank = exposure.steps.drop(columns="step").groupby("rank").mean().reset_index()
    sections = [
        Section(
            "Exposed communication",
            "Means over the analysed steps; the parts add up to the step. Waiting: a collective is under way, no "
            "compute is, and the last rank has not arrived. Transfer: all have. exposure.csv has every step.",
            table=table("exposure", by_rank, EXPOSURE_COLUMNS),
            figure=drawing(exposure_figure(by_rank[by_rank["rank"].isin(representatives(exposure.steps))])),
        )
    ]
    if exposure.collectives.empty:
        return sections
    places = by_place(exposure.collectives)
    most = places.sort_values("exposed_ms", ascending=False).head(SHOWN).sort_values("sequence")
    few = f"The {len(most)} of {len(places)} that are exposed longest; " if len(most) < len(places) else ""
    return [
        *sections,
        Section("Who was late", "", table=table("late", late_ranks(exposure), LATE_COLUMNS)),
        Section(
            "Collectives by their place in a step",
            f"{few}medians over steps and ranks. collectives.csv has every call of every rank.",
            table=table("places", most, PLACE_COLUMNS),
        ),
    ]


def exposure_figure(by_rank: pd.DataFrame) -> go.Figure:
    """A bar a rank, of the parts of its mean step."""
    figure = go.Figure()
    for column, (name, colour) in PARTS.items():
        if by_rank[column].any():
            figure.add_bar(
                y=[f"rank {rank}" for rank in by_rank["rank"]],
                x=by_rank[column],
                name=name,
                orientation="h",
                marker={"color": colour},
                hovertemplate="%{y}: %{x:.1f} ms a step, " + name + "<extra></extra>",
            )
    figure.update_layout(barmode="stack", height=130 + 28 * len(by_rank))
    figure.update_xaxes(title="ms a step, under the profiler")
    figure.update_yaxes(autorange="reversed")
    return styled(figure)


def late_ranks(exposure: Exposure) -> pd.DataFrame:
    """A row a rank (`LATE_COLUMNS`)."""
    calls = exposure.collectives
    each = calls.drop_duplicates(["step", "sequence"])["late_rank"].value_counts(normalize=True)
    others = calls[calls["late_rank"] != calls["rank"]].groupby("late_rank")["exposed_wait_ms"].sum()
    steps = exposure.steps["step"].nunique()
    return exposure.clocks.assign(
        last_pct=100 * exposure.clocks["rank"].map(each).fillna(0),
        costs_ms=exposure.clocks["rank"].map(others).fillna(0) / steps,
    )[list(LATE_COLUMNS)]


def by_place(calls: pd.DataFrame) -> pd.DataFrame:
    """A row a place in the step (`PLACE_COLUMNS`): medians over steps and ranks."""
    groups = calls.groupby(["sequence", "kind"])
    medians = groups.median(numeric_only=True)
    medians["late_rank"] = groups["late_rank"].agg(lambda ranks: ranks.mode().iloc[0])
    places = medians.reset_index()
    return places.assign(kind=places["kind"].map(KINDS).fillna(places["kind"]))[list(PLACE_COLUMNS)]
