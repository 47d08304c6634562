"""The report on one choice: `summary.html` and `summary.csv`."""

from pathlib import Path

from analysis.columns import MIB, SUMMARY_COLUMNS, Column
from analysis.report.figures import breakdown_figure, lanes_figure
from analysis.report.page import Section, drawing, render, table
from analysis.summary import WindowAnalysis, write_text

COLLECTIVE_COLUMNS = {
    "kind": Column("collective", "", "kind of collective"),
    "calls_per_step": Column("calls", "calls/step", "calls in one optimizer step"),
    "bytes_per_step": Column("payload", "MiB/step", "payload by nccl-tests' definition of size", MIB, 3),
    "mean_ms": Column("mean time", "ms", "mean duration of a call", 1, 3),
    "ms_per_step": Column("total time", "ms/step", "sum of durations in one optimizer step, hidden or not", 1, 2),
}
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
    """Write `summary.csv` and `summary.html` into `folder`, and answer with the page's path.

    Raises:
        TraceError: they cannot be written.
    """
    write_text(folder / "summary.csv", analysis.summary.to_csv(index=False))
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
            "Communication hides where a collective lies under compute. Where it does not, the compute lane shows "
            "exposed communication.",
            figure=drawing(lanes_figure(analysis.timelines, numbers[-1])),
        ),
        Section("Where the time went", figure=drawing(breakdown_figure(ranks, analysis.summary))),
        Section("Summary", table=table("summary", analysis.summary, SUMMARY_COLUMNS)),
        Section("Collectives of rank 0", table=table("collectives", analysis.collectives, COLLECTIVE_COLUMNS)),
        Section(
            "Kernels with the most time",
            f"The {len(kernels)} largest over all ranks and analysed steps.",
            table=table("kernels", kernels, KERNEL_COLUMNS),
        ),
    ]
    return render(f"{choice}: what its ranks did", lines, sections)
