"""The report on one choice: `summary.html`, and the CSV files of what it shows."""

from pathlib import Path

import pandas as pd

from analysis.columns import COMPONENTS, SHARDABLE, TIME_COLUMNS, Column
from analysis.report.collective_figure import collectives_figure, kinds_seen
from analysis.report.exposure_section import exposure_sections
from analysis.report.figures import breakdown_figure, lanes_figure
from analysis.report.lanes import kernels_sentence
from analysis.report.memory_figures import MOST_RANKS, memory_by_component_figure
from analysis.report.memory_timeline_figure import memory_timeline_figure
from analysis.report.page import Section, drawing, render, table
from analysis.report.summary_tables import audit_table, collectives_table, memory_table
from analysis.summary import WindowAnalysis, write_text

KERNEL_COLUMNS = {
    "rank": Column("rank", "", "rank of the process"),
    "kernel_type": Column("type", "", "COMPUTATION, COMMUNICATION or MEMORY"),
    "name": Column("kernel", "", "operator, collective or device kernel"),
    "total_us": Column("total", "ms", "sum of durations over the analysed steps (HTA)", 1e-3, 2),
    "mean_us": Column("mean", "ms", "mean duration (HTA)", 1e-3, 3),
    "max_us": Column("longest", "ms", "longest duration (HTA)", 1e-3, 3),
}
KERNELS_SHOWN = 16


def write_summary(analysis: WindowAnalysis, choice: str, folder: Path) -> Path:
    """Write `summary.html` and the CSV files beside it into `folder`, and answer with the page's path.

    Raises:
        TraceError: they cannot be written.
    """
    write_text(folder / "summary.csv", analysis.summary.to_csv(index=False))
    write_text(folder / "audit.csv", analysis.audit.to_csv(index=False))
    write_text(folder / "exposure.csv", analysis.exposure.steps.to_csv(index=False))
    write_text(folder / "collectives.csv", analysis.exposure.collectives.to_csv(index=False))
    page = folder / "summary.html"
    write_text(page, summary_page(analysis, choice))
    return page


def summary_page(analysis: WindowAnalysis, choice: str) -> str:
    ranks = [f"rank {timeline.rank}" for timeline in analysis.timelines]
    numbers = analysis.timelines[0].steps["number"].tolist()
    kernels = analysis.figures.kernels.sort_values("total_us", ascending=False).head(KERNELS_SHOWN).copy()
    if analysis.timelines[0].kind == "cpu":  # undo the names that HTA needs to recognise communication
        kernels["name"] = kernels["name"].str.replace("ncclDevKernel_", "gloo:", regex=False)
    lines = [
        f"Run {analysis.window.run_id}, optimizer steps {', '.join(map(str, numbers))}. {analysis.kind_sentence}",
        "Times are of profiled steps, which take longer than others; compare step times in the run record instead.",
    ]
    sections = [
        Section(
            f"One step of every rank (step {numbers[-1]})",
            "Communication hides where a collective lies under compute. Where it does not, a rank's first lane shows "
            f"exposed communication. {kernels_sentence(analysis.timelines, numbers[-1])}",
            figure=drawing(lanes_figure(analysis.timelines, numbers[-1])),
            traces=[(timeline.rank, "/".join(timeline.path.parts[-2:])) for timeline in analysis.timelines],
        ),
        Section(
            "Where the time went",
            "Overlap is the share of communication time in which compute ran as well. Hover over a heading for its "
            "meaning.",
            table=table("time", analysis.summary, TIME_COLUMNS),
            figure=drawing(breakdown_figure(ranks, analysis.summary)),
        ),
        *exposure_sections(analysis.exposure),
        *memory_sections(analysis),
        audit_section(analysis.audit),
        Section(
            "Collectives",
            "A payload is the whole tensor that is reduced, gathered or scattered, as nccl-tests counts it.",
            table=collectives_table(analysis.summary),
            figure=drawing(collectives_figure(analysis.summary)) if kinds_seen(analysis.summary) else None,
        ),
        Section(
            "Kernels with the most time",
            f"The {len(kernels)} largest over all ranks and analysed steps.",
            table=table("kernels", kernels, KERNEL_COLUMNS),
        ),
    ]
    return render(f"{choice}: what its ranks did", lines, sections)


def audit_section(audit: pd.DataFrame) -> Section:
    """Expected against measured, failures first."""
    heading = "Expected against measured"
    if audit.empty:
        return Section(heading, "Unknown: without a run record beside the traces, nobody says what to expect.")
    failed, unknown = (int((audit["result"] == result).sum()) for result in ("fail", "unknown"))
    text = f"{len(audit) - failed - unknown} of {len(audit)} checks pass"
    text += f", {failed} fail" if failed else ""
    text += f", of {unknown} the trace does not say" if unknown else ""
    order = audit["result"].map({"fail": 0, "unknown": 1, "pass": 2})
    rows = audit.assign(rank=audit["rank"].astype(object).fillna("all")).iloc[order.argsort(kind="stable")]
    text += ". Collectives are counted in every analysed step; memory may exceed the formula by padding and counters."
    return Section(heading, text, table=audit_table(rows))


def memory_sections(analysis: WindowAnalysis) -> list[Section]:
    """Memory by component and over the step; of a foreign trace, only that it is unknown."""
    summary = analysis.summary
    known = summary.dropna(subset=["model_states_bytes"])
    if not len(known):
        text = "Unknown: these traces have no run record beside them."
        return [Section("Memory", text, table=memory_table(summary))]
    few = f" The first {MOST_RANKS} ranks are drawn." if len(summary) > MOST_RANKS else ""
    shards = ", ".join(COMPONENTS[name] for name in SHARDABLE if name in (analysis.record or {}).get("shards", []))
    rule = f"sharded over {len(summary)} ranks: {shards}" if shards else "nothing is sharded"
    recorded = known.dropna(subset=["peak_bytes"])
    drawn = memory_by_component_figure(recorded) if len(recorded) else None
    sections = [
        Section(
            "Memory",
            f"Solid: at rest after a step; pale: the most in one step, which was recorded apart from all timed steps; "
            f"black line: the formula ({rule}), without padding. Model states are counted by storage.{few}",
            table=memory_table(summary),
            figure=drawing(drawn) if drawn else None,
        )
    ]
    timeline = memory_timeline_figure(analysis.record, recorded)
    if timeline:
        text = "Activations and temporaries: the most that was allocated beyond model states since the sample before."
        sections.append(Section("Memory over one step", text, figure=drawing(timeline)))
    return sections
