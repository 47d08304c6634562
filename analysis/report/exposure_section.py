"""The part of a summary page on exposed communication: how long, of which collective, and who was late."""

import pandas as pd
import plotly.graph_objects as go

from analysis.columns import BUCKET_COLUMNS, EXPOSURE_COLUMNS
from analysis.metrics.buckets import MOST_PLACES, buckets
from analysis.metrics.exposure import Exposure
from analysis.report.bandwidth_figure import bandwidth_section
from analysis.report.figures import COLOURS, styled
from analysis.report.many_ranks import representatives
from analysis.report.page import Section, drawing, table
from analysis.report.straggler_section import straggler_section
from analysis.traces.collectives import KINDS

PARTS = {
    "compute_ms": ("compute", COLOURS["compute"], ""),
    "exposed_wait_ms": ("exposed: waiting for the last rank", COLOURS["exposed"], "/"),
    "exposed_transfer_ms": ("exposed: transfer", COLOURS["exposed"], ""),
    "exposed_copy_ms": ("exposed memory copies", COLOURS["memory copy"], ""),
    "idle_ms": ("idle", COLOURS["idle"], ""),
}
"""The parts that a step has: name, colour and hatching."""
SHOWN = 32
"""Rows of the table of buckets."""


def exposure_sections(exposure: Exposure) -> list[Section]:
    by_rank = exposure.steps.drop(columns="step").groupby("rank").mean().reset_index()
    drawn = by_rank[by_rank["rank"].isin(representatives(exposure.steps))]
    sections = [
        Section(
            "Exposed communication",
            "Means over the analysed steps; the parts add up to the step. Waiting: a collective is under way, no "
            "compute is, and the last rank has not arrived. Transfer: all have. exposure.csv has every step."
            + unmatched(exposure.collectives),
            table=table("exposure", by_rank, EXPOSURE_COLUMNS),
            figure=drawing(exposure_figure(drawn)),
        )
    ]
    if exposure.collectives.empty:
        return sections
    return [
        *sections,
        straggler_section(exposure),
        bucket_section(exposure.collectives, exposure.steps["step"].nunique()),
        bandwidth_section(exposure.collectives),
    ]


def unmatched(calls: pd.DataFrame) -> str:
    """What the reader must know about calls that could not be matched over ranks; empty where all could."""
    share = calls["wait_ms"].isna().mean() if len(calls) else 0.0
    if not share:
        return ""
    why = (
        "the traces do not say of which process group they are"
        if (calls["group"] == "").any()
        else "not every rank of their group has one, or they are messages between two ranks"
    )
    return f" {100 * share:.0f} % of the calls could not be matched over ranks ({why}): all their time is transfer."


def bucket_section(calls: pd.DataFrame, steps: int) -> Section:
    """Calls by bucket, those exposed longest where there are too many to show."""
    rows = buckets(calls, steps)
    most = rows.sort_values("exposed_ms_per_step", ascending=False, kind="stable").head(SHOWN).sort_index()
    few = f"The {len(most)} of {len(rows)} that are exposed longest. " if len(most) < len(rows) else ""
    columns = {name: column for name, column in BUCKET_COLUMNS.items() if name != "group" or rows[name].nunique() > 1}
    shown = most.assign(kind=most["kind"].map(KINDS).fillna(most["kind"]))
    return Section(
        "Calls by bucket",
        f"{few}A row a call of the step; where a step has more than {MOST_PLACES}, those of one kind and size share a "
        "row. Means over steps and ranks; times of a call are medians. A start below 0 lies before the end of "
        "backward: only then can a bucket hide. collectives.csv has every call of every rank.",
        table=table("places", shown, columns),
    )


def exposure_figure(by_rank: pd.DataFrame) -> go.Figure:
    """A bar a rank, of the parts of its mean step."""
    figure = go.Figure()
    if by_rank["exposed_wait_ms"].isna().all():  # of an incomplete run, nobody knows who waited for whom
        by_rank = by_rank.assign(exposed_transfer_ms=by_rank["exposed_ms"])
    for column, (name, colour, hatching) in PARTS.items():
        if by_rank[column].any():
            figure.add_bar(
                y=[f"rank {rank}" for rank in by_rank["rank"]],
                x=by_rank[column],
                name=name,
                orientation="h",
                marker={"color": colour, "pattern": {"shape": hatching}},
                hovertemplate="%{y}: %{x:.1f} ms a step, " + name + "<extra></extra>",
            )
    figure.update_layout(barmode="stack", height=130 + 28 * len(by_rank))
    figure.update_xaxes(title="ms a step, under the profiler")
    figure.update_yaxes(autorange="reversed")
    return styled(figure)
