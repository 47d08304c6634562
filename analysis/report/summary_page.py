"""The report on one choice: `summary.html`, and the CSV files of what it shows."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.columns import COMPONENTS, SHARDABLE, TIME_COLUMNS, Column
from analysis.comparison.labels import labels
from analysis.metrics.stragglers import stragglers
from analysis.report.collective_figure import collectives_figure, kinds_seen
from analysis.report.exposure_section import exposure_sections
from analysis.report.figures import breakdown_figure, lanes_figure
from analysis.report.lanes import kernels_sentence
from analysis.report.many_ranks import abridged, ranks_section, representatives
from analysis.report.memory_figures import MOST_PANELS, memory_by_component_figure
from analysis.report.memory_timeline_figure import memory_timeline_figure
from analysis.report.page import Section, drawing, render, table
from analysis.report.summary_tables import audit_table, collectives_table, memory_table
from analysis.summary import WindowAnalysis, failure_of, write_csv, write_text
from analysis.traces.timeline import RankTimeline
from analysis.wording import listed

KERNEL_COLUMNS = {
    "rank": Column("rank", "", "rank of the process"),
    "kernel_type": Column("type", "", "COMPUTATION, COMMUNICATION or MEMORY"),
    "name": Column("kernel", "", "operator, collective or device kernel"),
    "total_us": Column("total", "ms", "sum of durations over the analysed steps (HTA)", 1e-3, 2),
    "mean_us": Column("mean", "ms", "mean duration (HTA)", 1e-3, 3),
    "max_us": Column("longest", "ms", "longest duration (HTA)", 1e-3, 3),
}
KERNELS_SHOWN = 16
CHECKS_SHOWN = 200


def write_summary(analysis: WindowAnalysis, choice: str, folder: Path) -> Path:
    """Write `summary.html` and the CSV files beside it into `folder`, and answer with the page's path.

    Raises:
        TraceError: they cannot be written.
    """
    write_csv(folder / "summary.csv", analysis.summary)
    write_csv(folder / "audit.csv", analysis.audit)
    write_csv(folder / "exposure.csv", analysis.exposure.steps)
    write_csv(folder / "collectives.csv", analysis.exposure.collectives)
    write_csv(folder / "stragglers.csv", stragglers(analysis.exposure))
    page = folder / "summary.html"
    write_text(page, summary_page(analysis, choice))
    return page


def summary_page(analysis: WindowAnalysis, choice: str) -> str:
    steps = analysis.exposure.steps
    ranks = representatives(steps)
    timelines = [timeline for timeline in analysis.timelines if timeline.rank in ranks]
    summary = analysis.summary[analysis.summary["rank"].isin(ranks)]
    numbers = timelines[0].steps["number"].tolist()
    lines = [
        f"Run {analysis.window.run_id}, optimizer steps {', '.join(map(str, numbers))}. {analysis.kind_sentence}",
        "Times are of profiled steps, which take longer than others; compare step times in the run record instead.",
    ]
    lines += labels(analysis.record)
    if len(numbers) == 1:
        lines.append("Only one step could be analysed, so nothing here says how far steps differ.")
    if left_out := sum(timeline.left_out for timeline in analysis.timelines):
        lines.append(f"{left_out} events without a usable time were left out.")
    is_cut = len(ranks) < len(analysis.summary)
    by_rank = [
        Section(
            "Where the time went",
            "Overlap is the share of communication time in which compute ran as well.",
            table=table("time", analysis.summary, TIME_COLUMNS),
            figure=drawing(breakdown_figure([f"rank {rank}" for rank in summary["rank"]], summary)),
        ),
        *exposure_sections(analysis.exposure),
        *memory_sections(analysis),
        Section(
            "Collectives",
            "A payload is the whole tensor that is reduced, gathered or scattered, as nccl-tests counts it.",
            table=collectives_table(analysis.summary),
            figure=drawing(collectives_figure(summary)) if kinds_seen(summary) else None,
        ),
    ]
    sections = [
        *([ranks_section(steps, ranks)] if is_cut else []),
        lanes_section(timelines, numbers[-1]),
        *(abridged(section, list(ranks)) for section in by_rank),
        audit_section(analysis.audit, list(ranks)),
        kernels_section(analysis),
    ]
    return render(f"{choice}: what its ranks did", lines, sections, banner=incomplete(analysis))


def incomplete(analysis: WindowAnalysis) -> str:
    """What is missing of the run; empty where nothing is."""
    failure = failure_of(analysis.record) if analysis.record else ""
    lines = [f"Not a whole run: {failure}."] if failure else []
    if analysis.problems:
        used = listed([timeline.rank for timeline in analysis.timelines])
        lines.append(
            f"Incomplete: of rank {used} only, so without the figures that compare ranks. "
            f"{'; '.join(analysis.problems)}."
        )
    return " ".join(lines)


def lanes_section(timelines: Sequence[RankTimeline], step: int) -> Section:
    """One step, and where to find the rest."""
    return Section(
        f"One step of every rank (step {step})",
        "Communication hides where a collective lies under compute. Where it does not, a rank's first lane shows "
        f"exposed communication. {kernels_sentence(timelines, step)}",
        figure=drawing(lanes_figure(timelines, step)),
        traces=[(timeline.rank, "/".join(timeline.path.parts[-2:])) for timeline in timelines],
    )


def kernels_section(analysis: WindowAnalysis) -> Section:
    kernels = analysis.figures.kernels.sort_values("total_us", ascending=False).head(KERNELS_SHOWN)
    if analysis.timelines[0].kind == "cpu":  # the lowering gave collectives the name that HTA needs
        kernels = kernels.assign(name=kernels["name"].str.replace("ncclDevKernel_", "gloo:", regex=False))
    return Section(
        "Kernels with the most time",
        f"The {len(kernels)} largest over all ranks and analysed steps.",
        table=table("kernels", kernels, KERNEL_COLUMNS),
    )


def audit_section(audit: pd.DataFrame, ranks: Sequence[int]) -> Section:
    """Expected against measured, failures first; of what passes, the rows of `ranks` and of the whole run."""
    heading = "Expected against measured"
    if audit.empty:
        return Section(
            heading, "Unknown: without the record of a whole run beside the traces, nobody says what to expect."
        )
    failed, unknown = (int((audit["result"] == result).sum()) for result in ("fail", "unknown"))
    text = f"{len(audit) - failed - unknown} of {len(audit)} checks pass"
    text += f", {failed} fail" if failed else ""
    text += f", of {unknown} the trace does not say" if unknown else ""
    order = audit["result"].map({"fail": 0, "unknown": 1, "pass": 2})
    rows = audit.assign(rank=audit["rank"].astype(object).fillna("all")).iloc[order.argsort(kind="stable")]
    rows = rows[(rows["result"] != "pass") | rows["rank"].isin(["all", *ranks])].head(CHECKS_SHOWN)
    text += ". Collectives are counted in every analysed step; memory may exceed the formula by padding and counters."
    text += f" {len(rows)} are shown, audit.csv has all." if len(rows) < len(audit) else ""
    return Section(heading, text, table=audit_table(rows))


def memory_sections(analysis: WindowAnalysis) -> list[Section]:
    """Memory by component and over the step; of a foreign trace, only that it is unknown."""
    summary = analysis.summary
    known = summary.dropna(subset=["model_states_bytes"])
    if not len(known):
        text = "Unknown: these traces have no record of a whole run beside them."
        return [Section("Memory", text, table=memory_table(summary))]
    shards = ", ".join(COMPONENTS[name] for name in SHARDABLE if name in (analysis.record or {}).get("shards", []))
    ranks = analysis.record["world_size"] if analysis.record else len(summary)
    rule = f"sharded over {ranks} ranks: {shards}" if shards else "nothing is sharded"
    panels = representatives(analysis.exposure.steps, MOST_PANELS)
    recorded = known[known["rank"].isin(panels)].dropna(subset=["peak_bytes"])
    named = ", ".join(f"{rank} ({role})" for rank, role in panels.items())
    few = f" Drawn: ranks {named}." if len(panels) < len(summary) else ""
    drawn = memory_by_component_figure(recorded) if len(recorded) else None
    sections = [
        Section(
            "Memory",
            f"Solid: at rest after a step; pale: the most in one step, which was recorded apart from all timed steps; "
            f"line: the formula ({rule}), without padding. Model states are counted by storage.{few}",
            table=memory_table(summary),
            figure=drawing(drawn) if drawn else None,
        )
    ]
    timeline = memory_timeline_figure(analysis.record, recorded)
    if timeline:
        text = "Activations and temporaries: the most that was allocated beyond model states since the sample before."
        sections.append(Section("Memory over one step", text, figure=drawing(timeline)))
    return sections
