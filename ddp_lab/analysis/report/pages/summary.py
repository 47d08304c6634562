"""The report on one choice: `summary.html`, and the CSV files of what it shows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ddp_lab.analysis.columns import COLUMNS, COMPONENTS, SHARDABLE
from ddp_lab.analysis.files import write_csv
from ddp_lab.analysis.mesh import Mesh, mesh_of, sharding_ranks
from ddp_lab.analysis.metrics.pipeline import pipeline_steps
from ddp_lab.analysis.metrics.stragglers import stragglers
from ddp_lab.analysis.record import failure_of
from ddp_lab.analysis.report.figures.lanes import kernels_sentence
from ddp_lab.analysis.report.figures.lanes_figure import lanes_figure
from ddp_lab.analysis.report.figures.memory import MOST_PANELS, memory_figure, memory_timeline_figure
from ddp_lab.analysis.report.page import Section, drawing, render, table, write_page
from ddp_lab.analysis.report.pages.experts import experts_section
from ddp_lab.analysis.report.pages.exposure import exposure_sections, mesh_section
from ddp_lab.analysis.report.pages.heads import labels
from ddp_lab.analysis.report.pages.memory import where_sections
from ddp_lab.analysis.report.pages.pipeline import pipeline_section
from ddp_lab.analysis.report.pages.ranks import abridged, ranks_section, representatives
from ddp_lab.analysis.report.pages.tables import audit_table, collectives_table, memory_table
from ddp_lab.analysis.summary import WindowAnalysis
from ddp_lab.analysis.traces.timeline import RankTimeline
from ddp_lab.runtime.errors import listed

KERNELS_SHOWN = 16
CHECKS_SHOWN = 200


def write_summary(analysis: WindowAnalysis, choice: str, folder: Path) -> Path:
    """Write `summary.html` and the CSV files beside it into `folder`, and return the page's path.

    Raises:
        UserError: they cannot be written.
    """
    write_csv(folder / "summary.csv", analysis.summary)
    write_csv(folder / "audit.csv", analysis.audit)
    write_csv(folder / "exposure.csv", analysis.exposure.steps)
    write_csv(folder / "collectives.csv", analysis.exposure.collectives)
    write_csv(folder / "dimensions.csv", analysis.exposure.dimensions)
    write_csv(folder / "pipeline.csv", pipeline_steps(analysis.passes, analysis.exposure.steps))
    write_csv(folder / "stragglers.csv", stragglers(analysis.exposure))
    page = folder / "summary.html"
    write_page(page, summary_page(analysis, choice))
    return page


def summary_page(analysis: WindowAnalysis, choice: str) -> str:
    steps, mesh = analysis.exposure.steps, mesh_of(analysis.record)
    ranks = representatives(steps)
    timelines = [timeline for timeline in analysis.timelines if timeline.rank in ranks]
    drawn, shown = analysis.summary[analysis.summary["rank"].isin(ranks)], abridged(analysis.summary, ranks)
    numbers = timelines[0].steps["number"].tolist()
    lines = [
        f"Run {analysis.window.run_id}, optimizer step{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: what "
        f"the profiler recorded. {analysis.kind_sentence}",
        "Times are of profiled steps, which take longer than others. The run record has the step times to compare.",
        *labels(analysis.record),
    ]
    if len(numbers) == 1:
        lines.append("Only one step could be analysed, so it is unknown how much steps differ.")
    sections = [
        *([ranks_section(steps, ranks)] if len(drawn) < len(analysis.summary) else []),
        lanes_section(timelines, numbers[-1], mesh),
        *pipeline_section(analysis.passes, pipeline_steps(analysis.passes, steps), list(ranks)),
        Section(
            "Where the time went",
            "By Holistic Trace Analysis (HTA), from the first kernel to the last. Exposed: communication ran and "
            "compute did not. Overlap: the share of communication time in which compute ran as well.",
            table=table("time", shown, COLUMNS["time"]),
        ),
        *exposure_sections(analysis.exposure),
        *mesh_section(analysis.exposure, mesh, ranks),
        *experts_section(analysis.record),
        *where_sections(analysis.record, list(representatives(steps, MOST_PANELS))),
        *memory_sections(analysis),
        Section(
            "Collectives",
            "A payload is the whole tensor that is reduced, gathered or scattered, as nccl-tests counts it. Sent is "
            "what a rank must send of it: (N-1)/N, for an all-reduce twice that. Gloo's own reduce-scatter sends twice "
            "as much, since it is an all-reduce. In brackets: the calls, one from each rank, that make it over Gloo.",
            table=collectives_table(analysis.exposure, mesh, ranks),
            folded=True,
        ),
        audit_section(analysis.audit, list(ranks)),
        kernels_section(analysis.timelines),
    ]
    title = f"{choice}: what its ranks did"
    return render(title, lines, sections, banner=incomplete(analysis), verdict=verdict_of(analysis.record))


def verdict_of(record: dict[str, Any] | None) -> Sequence[str]:
    """What the run said of itself at its end, from all timed steps, and what to try next; empty without a record."""
    verdict = record["verdict"] if record else []
    return [f"{verdict[0][:1].upper()}{verdict[0][1:]}.", f"Try next: {verdict[1]}."] if len(verdict) == 2 else []


def incomplete(analysis: WindowAnalysis) -> str:
    """What is missing of the run; empty if nothing is."""
    failure = failure_of(analysis.record) if analysis.record else ""
    lines = [f"Not a whole run: {failure}."] if failure else []
    if analysis.problems:
        used = listed([timeline.rank for timeline in analysis.timelines])
        lines.append(
            f"Incomplete: of rank {used} only, so without the figures that compare ranks. "
            f"{'; '.join(analysis.problems)}."
        )
    return " ".join([*lines, *(f"Doubtful: {doubt}." for doubt in analysis.doubts)])


def lanes_section(timelines: Sequence[RankTimeline], step: int, mesh: Mesh | None) -> Section:
    """One step, and which files have the rest."""
    return Section(
        f"One step of every rank (step {step})",
        "A collective is hidden where it lies under compute. Where it is not hidden, the rank's first lane shows "
        f"exposed communication. {kernels_sentence(timelines, step)}",
        figure=drawing(lanes_figure(timelines, step, mesh)),
        traces=[(timeline.rank, "/".join(timeline.path.parts[-2:])) for timeline in timelines],
    )


def kernel_times(timelines: Sequence[RankTimeline]) -> pd.DataFrame:
    """Columns rank, lane, name, sum, mean, max (us) of the kernels that the analysed steps issued, by sum."""
    tables = []
    for timeline in timelines:
        kernels = timeline.issued_kernels()
        times = (kernels["end"] - kernels["start"]).groupby([kernels["lane"], kernels["name"]])
        tables.append(times.agg(["sum", "mean", "max"]).reset_index().assign(rank=timeline.rank))
    return pd.concat(tables)[list(COLUMNS["kernels"])].sort_values("sum", ascending=False, kind="stable")


def kernels_section(timelines: Sequence[RankTimeline]) -> Section:
    kernels = kernel_times(timelines).head(KERNELS_SHOWN)
    return Section(
        "Kernels with the most time",
        f"The {len(kernels)} largest over all ranks and analysed steps.",
        table=table("kernels", kernels, COLUMNS["kernels"]),
        folded=True,
    )


def audit_section(audit: pd.DataFrame, ranks: Sequence[int]) -> Section:
    """Expected against measured, failures first. Of passed checks, those of `ranks` and of the whole run."""
    heading = "Expected against measured"
    if audit.empty:
        return Section(heading, "Unknown: there is no record of a completed run beside the traces.")
    failed, unknown = (int((audit["result"] == result).sum()) for result in ("fail", "unknown"))
    text = f"{len(audit) - failed - unknown} of {len(audit)} checks pass"
    text += f", {failed} fail" if failed else ""
    text += f", {unknown} are unknown because the trace does not say" if unknown else ""
    order = audit["result"].map({"fail": 0, "unknown": 1, "pass": 2})
    rows = audit.assign(rank=audit["rank"].astype(object).fillna("all")).iloc[order.argsort(kind="stable")]
    rows = rows[(rows["result"] != "pass") | rows["rank"].isin(["all", *ranks])].head(CHECKS_SHOWN)
    text += ". Collectives are counted in every analysed step. Memory may exceed the formula by padding and counters."
    text += f" {len(rows)} checks are shown; audit.csv has all." if len(rows) < len(audit) else ""
    whole = f"{heading}: all pass" if not failed and not unknown else heading
    return Section(whole, text, table=audit_table(rows), folded=not failed)


def memory_sections(analysis: WindowAnalysis) -> list[Section]:
    """Memory by component and over the step. Of a foreign trace it is unknown."""
    summary, ranks = analysis.summary, representatives(analysis.exposure.steps, MOST_PANELS)
    shown = memory_table(abridged(summary, representatives(analysis.exposure.steps)))
    if summary["model_states_bytes"].isna().all():
        return [Section("Memory", "Unknown: there is no record of a run with memory beside the traces.")]
    record = analysis.record or {}
    shards = ", ".join(COMPONENTS[name] for name in SHARDABLE if name in record.get("shards", []))
    over = sharding_ranks(record) if shards else 1
    rule = f"sharded over {over} ranks: {shards}" if over > 1 else "nothing is sharded"
    drawn = summary[summary["rank"].isin(ranks)].dropna(subset=["model_states_bytes", "peak_bytes"])
    named = ", ".join(f"{rank} ({role})" for rank, role in ranks.items())
    few = f" Drawn: ranks {named}." if len(ranks) < len(summary) else ""
    figure = memory_figure([f"rank {rank}" for rank in drawn["rank"]], drawn) if len(drawn) else None
    sections = [
        Section(
            "Memory",
            "Model states at rest, after a step, by component. Grey: the peak in one step, which was recorded outside "
            f"all timed steps. Line: the formula ({rule}), without padding. Model states are counted by storage.{few}",
            table=shown,
            figure=drawing(figure) if figure else None,
        )
    ]
    timeline = memory_timeline_figure(analysis.record, drawn)
    if timeline:
        text = "Activations and temporaries: the most allocated beyond model states since the sample before."
        sections.append(Section("Memory over one step", text, figure=drawing(timeline)))
    return sections
