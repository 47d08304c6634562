"""Sections of the summary page on exposed communication: how long, which rank was late, which calls, and
along which dimension of the mesh."""

from collections.abc import Iterable

import pandas as pd

from ddp_lab.analysis.columns import COLUMNS
from ddp_lab.analysis.mesh import Mesh
from ddp_lab.analysis.metrics.exposure import Exposure
from ddp_lab.analysis.metrics.stragglers import by_rank, has_stages, stragglers, verdict
from ddp_lab.analysis.report.figures.times import parts_figure, ranks_figure
from ddp_lab.analysis.report.page import Section, drawing, table
from ddp_lab.analysis.report.pages.ranks import abridged, representatives
from ddp_lab.collectives.kinds import label

ENOUGH_STEPS = 4
"""With fewer analysed steps a heat map says no more than the table."""


def exposure_sections(exposure: Exposure) -> list[Section]:
    mean = exposure.steps.drop(columns="step").groupby("rank").mean().reset_index()
    ranks = representatives(exposure.steps)
    drawn = mean[mean["rank"].isin(ranks)]
    sections = [
        Section(
            "Exposed communication",
            "The exposed time above, by cause; means over the analysed steps. HTA counts from the first kernel to the "
            "last, and copies with communication. Here steps are whole, and copies apart. Waiting: a collective runs, "
            "compute does not, and the last rank or a pipeline's message has not arrived. Transfer: the same after its "
            "arrival. exposure.csv has every step." + unmatched(exposure.collectives),
            table=table("exposure", abridged(mean, ranks).drop(columns=["compute_ms", "idle_ms"]), COLUMNS["exposure"]),
            figure=drawing(parts_figure([f"rank {rank}" for rank in drawn["rank"]], drawn)),
        )
    ]
    if exposure.collectives.empty:
        return sections
    steps = exposure.steps["step"].nunique()
    return [*sections, straggler_section(exposure), bucket_section(buckets(exposure.collectives, steps))]


MOST_PLACES = 32
"""Up to this many calls of a step get a row each. If there are more, calls of one kind and size share a row."""


def buckets(collectives: pd.DataFrame, steps: int) -> pd.DataFrame:
    """The table of `collectives.csv` by place in the step, or by kind and size (the columns `places`).

    Counts and sums are means over steps and participating ranks. Times of a call are medians.

    Args:
        steps: Number of analysed steps.
    """
    named = collectives.assign(
        group=collectives["dimension"].where(collectives["dimension"] != "", collectives["group"]),
        kind=[label(*call) for call in zip(collectives["kind"], collectives["made_of"], strict=True)],
    )
    places = len(named[["group", "sequence", "kind"]].drop_duplicates())
    alike = named["sequence" if places <= MOST_PLACES else "bytes"]
    calls = named.assign(alike=alike, place=named["sequence"]).groupby(["group", "kind", "alike"], dropna=False)
    medians = calls[["bytes", "after_backward_ms", "duration_ms", "busbw_gbps"]].median()
    means = calls.agg(
        calls_per_step=("rank", "size"),
        total_ms_per_step=("duration_ms", "sum"),
        exposed_ms_per_step=("exposed_ms", "sum"),
    ).div(steps * calls["rank"].nunique(), axis="index")
    table = medians.join([means, calls["place"].min()]).reset_index()
    return table.sort_values(["group", "place"], kind="stable")[list(COLUMNS["places"])].reset_index(drop=True)


def unmatched(calls: pd.DataFrame) -> str:
    """A sentence on calls that could not be matched over ranks; empty if all could."""
    share = calls["wait_ms"].isna().mean() if len(calls) else 0.0
    if not share:
        return ""
    why = (
        "the traces do not say of which process group they are"
        if (calls["group"] == "").any()
        else "not every rank of their group has one, or they are messages between two ranks"
    )
    return (
        f" {100 * share:.0f} % of the calls could not be matched over ranks ({why}): all their time is transfer, but "
        "for what a pipeline waits for."
    )


def straggler_section(exposure: Exposure) -> Section:
    """Which rank was late: a sentence, a table by rank, and rank by step if there are enough steps."""
    late = stragglers(exposure)
    heading = "Who was late"
    if not late["collectives"].any():
        between = (
            " Which stage of a pipeline comes last, its schedule says." if has_stages(exposure.collectives) else ""
        )
        return Section(heading, f"Unknown: no collective could be matched over ranks.{between}")
    ranks = by_rank(late)
    by_chance = 100 * late["last"].sum() / late["collectives"].sum()
    text = (
        f"{verdict(exposure, ranks)} If ranks are alike, each arrives last in {by_chance:.0f} %. Clock: how far a "
        "rank's clock is ahead, which is subtracted. Residual: half of the collectives then end within it. "
        "stragglers.csv has every step."
    )
    panels = {"lateness_ms": "lateness", "costs_ms": "waiting of others"}
    shown = abridged(ranks.merge(exposure.clocks, on="rank"), representatives(exposure.steps))
    return Section(
        heading,
        text,
        table=table("late", shown[list(COLUMNS["late"])], COLUMNS["late"]),
        figure=drawing(ranks_figure(late, panels)) if late["step"].nunique() >= ENOUGH_STEPS else None,
    )


def bucket_section(rows: pd.DataFrame) -> Section:
    """Calls by bucket; of many, those with the most exposed time."""
    shown = rows.nlargest(MOST_PLACES, "exposed_ms_per_step").sort_index()
    return Section(
        "Calls by bucket",
        f"The {len(shown)} of {len(rows)} with the most exposed time. Of a step with more than {MOST_PLACES} calls, "
        "those of one kind and size share a row. Means over steps and ranks; times of a call are medians. A start "
        "below 0 is before the end of backward: only such a bucket can be hidden. busbw is payload over the time from "
        "the last rank's arrival to the last rank's end, times nccl-tests' factor, so it can be compared with the rate "
        "of the link. collectives.csv has every call of every rank.",
        folded=True,
        table=table("places", shown, COLUMNS["places"]),
    )


def mesh_section(exposure: Exposure, mesh: Mesh | None, ranks: Iterable[int]) -> list[Section]:
    """None without a mesh. The table has the rows of `ranks`."""
    if mesh is None or exposure.dimensions.empty:
        return []
    mean = exposure.dimensions.drop(columns="step").groupby(["rank", "dimension"], sort=False).mean().reset_index()
    shown = mean[mean["rank"].isin(list(ranks))]
    degrees = " x ".join(f"{degree} {name}" for name, degree in mesh.items())
    text = (
        f"The mesh is {degrees}. Means over the analysed steps; dimensions.csv has every step. Exposed counts each "
        "moment once, for the collective that was issued first, or the message for which a pipeline waits; exposed "
        "while running counts a moment for every dimension that communicates in it."
    )
    return [Section("Dimensions of the mesh", text, table=table("dimensions", shown, COLUMNS["dimensions"]))]
