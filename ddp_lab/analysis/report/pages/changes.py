"""The report on two runs of one choice: `changes.html` and `changes.csv`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ddp_lab.analysis.columns import CHANGE_COLUMNS, PART_COLUMNS, Column
from ddp_lab.analysis.comparison.changes import Run, changes, summary
from ddp_lab.analysis.comparison.compare import traced_row
from ddp_lab.analysis.comparison.fairness import Difference
from ddp_lab.analysis.files import write_csv
from ddp_lab.analysis.metrics.significance import FEWEST_PAIRS
from ddp_lab.analysis.report.figures.lanes_figure import lanes_by_choice_figure
from ddp_lab.analysis.report.figures.times import loss_figure, parts_figure, step_times_figure
from ddp_lab.analysis.report.page import Section, cell, drawing, render, table, titled, write_page
from ddp_lab.analysis.report.pages.heads import audit_lines, banner, fairness_section, labels

DIGITS = {"bytes": 0, "bytes/step": 0, "nats": 6}
WHICH = {"choice": Column("run", "", "which of the two")}
ORDER = ("figure", "result", *(name for name in CHANGE_COLUMNS if name not in ("figure", "result")))
"""The result comes early, so that a narrow screen shows it."""
IN_UNIT = ("baseline", "run", "change")
HOW_TESTED = (
    "Step k of both runs trains on the same samples, so figures that vary from step to step are compared step by step, "
    "over batches of consecutive steps. Change and 95 % interval (of each figure alone) are Hodges and Lehmann's; p is "
    "that of Wilcoxon's signed-rank test, corrected for the number of figures by Holm. "
    f"Below {FEWEST_PAIRS} steps in both runs the result is unknown (to test the parts of a step, train with a larger "
    "--profile-active); so is that of figures measured once a run. Calls and bytes are counted, so every difference "
    "counts. The limit: the runs were made one after the other, so a machine that was slower during one run changes "
    "these figures."
)


@dataclass(frozen=True)
class TwoRuns:
    """What `changes.html` shows. `differences` are settings in which the user allows the runs to differ."""

    baseline: Run
    run: Run
    differences: Sequence[Difference]

    @property
    def named(self) -> dict[str, Run]:
        return {"baseline": self.baseline, "run": self.run}


def write_changes(runs: TwoRuns, folder: Path) -> tuple[pd.DataFrame, Path]:
    """Write `changes.csv` and `changes.html` into `folder`, and return the table and the page's path.

    Raises:
        TraceError: they cannot be written.
    """
    rows = changes(runs.baseline, runs.run)
    write_csv(folder / "changes.csv", rows)
    page = folder / "changes.html"
    write_page(page, changes_page(runs, rows))
    return rows, page


def changes_page(runs: TwoRuns, rows: pd.DataFrame) -> str:
    record = runs.run.record
    records = {name: each.record for name, each in runs.named.items()}
    lines = [
        f"Run {record['run_id']} against baseline {runs.baseline.record['run_id']}; workload "
        f"{record['config']['workload']}, {record['world_size']} ranks over {record['backend']} on "
        f"{record['device_name']}.",
        *dict.fromkeys(line for each in records.values() for line in labels(each)),
        *audit_lines({name: each.traced.failed_checks for name, each in runs.named.items() if each.traced}),
    ]
    sections = [
        fairness_section(runs.differences, "run"),
        Section("What changed", summary(rows)),
        Section("Figures", HOW_TESTED, table=changes_table(rows)),
        Section(
            "Step time",
            "Timed steps only: not the first, and none under the profiler.",
            figure=drawing(step_times_figure(records)),
        ),
        *trace_sections(runs),
        Section("Training loss", figure=drawing(loss_figure(records))),
    ]
    return render(f"{record['choice']}: what changed", lines, sections, banner(runs.differences, "run"))


def changes_table(rows: pd.DataFrame) -> dict[str, Any]:
    """Every row. The digits of a figure depend on its unit."""
    cells = []
    for row in rows.to_dict("records"):
        of_unit = Column("", row["unit"], "", 1, DIGITS.get(row["unit"], 2))
        cells.append([cell(name, row[name], of_unit if name in IN_UNIT else CHANGE_COLUMNS[name]) for name in ORDER])
    return titled("changes", [CHANGE_COLUMNS[name] for name in ORDER], cells)


def trace_sections(runs: TwoRuns) -> list[Section]:
    """Parts of a step and lanes, of the runs that have traces."""
    traced = {name: each.traced for name, each in runs.named.items() if each.traced}
    if not traced:
        return []
    parts = pd.DataFrame([{"choice": name, **traced_row(each)} for name, each in traced.items()])
    drawn = ", ".join(f"{name}: rank {each.timeline.rank}, step {each.step}" for name, each in traced.items())
    return [
        Section(
            "Where the time went",
            "Means over ranks and profiled steps, which take longer than others; the parts add up to the step.",
            table=table("parts", parts, WHICH | PART_COLUMNS),
            figure=drawing(parts_figure(parts["choice"], parts)),
        ),
        Section(
            "One step of each run",
            f"The step of median duration, and in it the rank of median duration. {drawn}.",
            figure=drawing(lanes_by_choice_figure(traced)),
        ),
    ]
