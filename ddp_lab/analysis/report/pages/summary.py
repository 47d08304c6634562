"""The report on one choice: `summary.html`, and the CSV files of what it shows."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ddp_lab.analysis.columns import COLUMNS
from ddp_lab.analysis.files import write_csv
from ddp_lab.analysis.mesh import mesh_of
from ddp_lab.analysis.metrics.exposure import Exposure
from ddp_lab.analysis.metrics.memory import memory_parts
from ddp_lab.analysis.metrics.pipeline import pipeline_steps
from ddp_lab.analysis.metrics.stragglers import has_stages, lateness, straggler, stragglers
from ddp_lab.analysis.record import failure_of
from ddp_lab.analysis.report.figures.lanes_figure import lanes_figure
from ddp_lab.analysis.report.figures.memory import MOST_PANELS, memory_timeline_figure, where_figure
from ddp_lab.analysis.report.figures.times import parts_figure, ranks_figure
from ddp_lab.analysis.report.page import Block, render, table, write_page
from ddp_lab.analysis.report.pages.experts import MOST_LANES, expert_load, load_figure
from ddp_lab.analysis.report.pages.heads import labels
from ddp_lab.analysis.report.pages.out_of_memory import out_of_memory_block
from ddp_lab.analysis.report.pages.pipeline import bubbles, pipeline_figure
from ddp_lab.analysis.report.pages.tables import (
    MOST_PLACES,
    MOST_RANKS,
    abridged,
    audit_table,
    buckets,
    collectives_table,
    kernel_times,
    memory_table,
    representatives,
)
from ddp_lab.analysis.sentences import say
from ddp_lab.analysis.summary import WindowAnalysis

KERNELS_SHOWN = 16
CHECKS_SHOWN = 200
ENOUGH_STEPS = 4
"""With fewer analysed steps a heat map says no more than the table."""


def write_summary(analysis: WindowAnalysis, choice: str, folder: Path) -> Path:
    """Write `summary.html` and the CSV files beside it into `folder`, and return the page's path.

    Raises:
        UserError: they cannot be written.
    """
    exposure = analysis.exposure
    tables = {"summary": analysis.summary, "audit": analysis.audit, "exposure": exposure.steps}
    tables |= {"collectives": exposure.collectives, "dimensions": exposure.dimensions}
    tables |= {"pipeline": pipeline_steps(analysis.passes, exposure.steps), "stragglers": stragglers(exposure)}
    for name, frame in tables.items():
        write_csv(folder / f"{name}.csv", frame)
    page = folder / "summary.html"
    write_page(page, summary_page(analysis, choice))
    return page


def summary_page(analysis: WindowAnalysis, choice: str) -> str:
    record, numbers = analysis.record, analysis.timelines[0].steps["number"].tolist()
    used = [timeline.rank for timeline in analysis.timelines]
    failure = failure_of(record) if record else ""
    return render(
        f"{choice}: what its ranks did",
        [say("head", analysis, numbers), say("profiled"), *labels(record), *[say("one_step")] * (len(numbers) == 1)],
        [
            out_of_memory_block(record),
            *time_blocks(analysis, numbers[-1]),
            *memory_blocks(analysis),
            *table_blocks(analysis),
        ],
        banner=say("incomplete", failure, analysis.problems, used, analysis.doubts),
        verdict=verdict_of(analysis),
    )


def verdict_of(analysis: WindowAnalysis) -> Sequence[str]:
    """The verdict in the run's record, from all timed steps, and what to try next; without one, HTA's split of the
    analysed steps, if all of it is known."""
    if analysis.record and len(verdict := analysis.record["verdict"]) == 2:
        return [f"{verdict[0][:1].upper()}{verdict[0][1:]}.", f"Try next: {verdict[1]}."]
    split = say("split", analysis.summary)
    return [split, say("overlap", analysis.summary)] if split else []


def time_blocks(analysis: WindowAnalysis, last: int) -> list[Block]:
    """What the ranks did, and who waited for whom. Step `last` is drawn."""
    exposure, steps, mesh = analysis.exposure, analysis.exposure.steps, mesh_of(analysis.record)
    ranks, mean, calls = representatives(steps), by_rank(steps), exposure.collectives
    timelines = [timeline for timeline in analysis.timelines if timeline.rank in ranks]
    pipeline, passes = pipeline_steps(analysis.passes, steps), analysis.passes
    places, load = buckets(calls, steps["step"].nunique()), expert_load(analysis.record)
    worst_places = places.nlargest(MOST_PLACES, "exposed_ms_per_step").sort_index()
    dimensions = by_rank(exposure.dimensions, "dimension")

    def shown(name: str, frame: pd.DataFrame) -> dict[str, Any]:
        return table(name, abridged(frame, ranks), COLUMNS[name])

    return [
        Block(
            "All ranks",
            lambda: say("ranks", len(mean), ranks),
            len(ranks) < len(mean),
            figure=lambda: ranks_figure(steps, {"step_ms": "step time", "exposed_wait_ms": "exposed waiting"}),
        ),
        Block(
            f"One step of every rank (step {last})",
            lambda: say("lanes"),
            figure=lambda: lanes_figure(timelines, last, mesh),
            traces=[(timeline.rank, "/".join(timeline.path.parts[-2:])) for timeline in timelines],
        ),
        Block(
            "Pipeline",
            lambda: say("pipeline", bubbles(by_rank(pipeline)), last),
            len(pipeline) > 0,
            table=lambda: shown("pipeline", by_rank(pipeline)),
            figure=lambda: pipeline_figure(
                passes[(passes["step"] == last) & ((passes["pipeline"] == 0) | (len(mean) <= MOST_RANKS))]
            ),
        ),
        Block("Where the time went", lambda: say("time"), table=lambda: shown("time", analysis.summary)),
        Block(
            "Exposed communication",
            lambda: say("exposure", calls),
            table=lambda: shown("exposure", mean.drop(columns=["compute_ms", "idle_ms"])),
            figure=lambda: parts_figure(of_ranks(mean, ranks)),
        ),
        late_block(exposure, ranks),
        Block(
            "Calls by bucket",
            lambda: say("places", len(worst_places), len(places), MOST_PLACES),
            len(calls) > 0,
            table=lambda: table("places", worst_places, COLUMNS["places"]),
            folded=True,
        ),
        Block(
            "Dimensions of the mesh",
            lambda: say("dimensions", mesh),
            len(dimensions) > 0 and mesh is not None,
            table=lambda: table("dimensions", of_ranks(dimensions, ranks), COLUMNS["dimensions"]),
        ),
        Block(
            "Load of experts",
            lambda: say("experts", load, MOST_LANES),
            len(load) > 0,
            figure=lambda: load_figure(load),
        ),
    ]


def by_rank(frame: pd.DataFrame, *keys: str) -> pd.DataFrame:
    """Means over steps, by rank and `keys`."""
    return frame.drop(columns="step").groupby(["rank", *keys], sort=not keys).mean().reset_index()


def of_ranks(rows: pd.DataFrame, ranks: Iterable[int]) -> pd.DataFrame:
    return rows[rows["rank"].isin(list(ranks))]


def late_block(exposure: Exposure, ranks: Iterable[int]) -> Block:
    """Which rank was late: a sentence, a table by rank, and rank by step if there are enough steps."""
    late, calls = stragglers(exposure), exposure.collectives
    if not late["collectives"].any():
        return Block("Who was late", lambda: say("not_matched", has_stages(calls)), len(calls) > 0)
    totals = lateness(late)
    rows = abridged(totals.merge(exposure.clocks, on="rank"), ranks)[list(COLUMNS["late"])]
    panels = {"lateness_ms": "lateness", "costs_ms": "waiting of others"}
    return Block(
        "Who was late",
        lambda: say("late", straggler(exposure, totals), late["last"].sum() / late["collectives"].sum()),
        table=lambda: table("late", rows, COLUMNS["late"]),
        figure=lambda: ranks_figure(late, panels) if late["step"].nunique() >= ENOUGH_STEPS else None,
    )


def memory_blocks(analysis: WindowAnalysis) -> list[Block]:
    """What memory went to, by component, and over the step. Of a foreign trace it is unknown."""
    summary, record, steps = analysis.summary, analysis.record, analysis.exposure.steps
    few, parts = representatives(steps, MOST_PANELS), memory_parts(record)
    drawn = of_ranks(summary, few).dropna(subset=["model_states_bytes", "peak_bytes"])
    parts = of_ranks(parts, few)
    is_known = bool(summary["model_states_bytes"].notna().any())
    timeline = memory_timeline_figure(record, drawn) if is_known else None
    return [
        Block(
            "Where the memory went",
            lambda: say("where"),
            len(parts) > 0,
            table=lambda: table("where", parts, COLUMNS["where"]),
            figure=lambda: where_figure(parts),
        ),
        Block("Memory", lambda: say("no_memory"), not is_known),
        Block(
            "Memory",
            lambda: say("memory", few if len(few) < len(summary) else {}),
            is_known,
            table=lambda: memory_table(abridged(summary, representatives(steps))),
        ),
        Block("Memory over one step", lambda: say("memory_timeline"), timeline is not None, figure=lambda: timeline),
    ]


def table_blocks(analysis: WindowAnalysis) -> list[Block]:
    """What was sent, checks of it, and kernels."""
    exposure, ranks = analysis.exposure, representatives(analysis.exposure.steps)
    audit, kernels = analysis.audit, kernel_times(analysis.timelines).head(KERNELS_SHOWN)
    counts = audit["result"].value_counts()
    failed, unknown = (int(counts.get(result, 0)) for result in ("fail", "unknown"))
    heading = "Expected against measured"
    # failures first; of passed checks, those of the ranks shown and of the whole run
    order = audit["result"].map({"fail": 0, "unknown": 1, "pass": 2})
    rows = audit.assign(rank=audit["rank"].astype(object).fillna("all")).iloc[order.argsort(kind="stable")]
    rows = rows[(rows["result"] != "pass") | rows["rank"].isin(["all", *ranks])].head(CHECKS_SHOWN)
    return [
        Block(
            "Collectives",
            lambda: say("collectives"),
            table=lambda: collectives_table(exposure, mesh_of(analysis.record), ranks),
            folded=True,
        ),
        Block(heading, lambda: say("no_audit"), audit.empty),
        Block(
            heading if failed or unknown else f"{heading}: all pass",
            lambda: say("audit", len(audit), failed, unknown, len(rows)),
            not audit.empty,
            table=lambda: audit_table(rows),
            folded=not failed,
        ),
        Block(
            "Kernels with the most time",
            lambda: say("kernels", len(kernels)),
            table=lambda: table("kernels", kernels, COLUMNS["kernels"]),
            folded=True,
        ),
    ]
