"""The report on all choices side by side: `compare.html`, `compare.csv` and `compare.json`."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from ddp_lab.analysis.columns import CsvColumn, kind_of, kinds_run
from ddp_lab.analysis.comparison.compare import RATIOS, UNKNOWN, columns_of, comparison, standings, unsteady
from ddp_lab.analysis.comparison.fairness import BACKEND_CLASS, Difference, affected, by_class, class_of
from ddp_lab.analysis.comparison.outcome import Outcome, as_json, conclude, fastest
from ddp_lab.analysis.comparison.timing import work_of
from ddp_lab.analysis.comparison.traced import Traced
from ddp_lab.analysis.files import write_csv
from ddp_lab.analysis.metrics.significance import EXPECTED_DEGREES, EXPECTED_SPREAD, FEWEST_STEPS, LEVEL
from ddp_lab.analysis.metrics.utilization import peak_of
from ddp_lab.analysis.report.figures.lanes_figure import lanes_by_choice_figure
from ddp_lab.analysis.report.figures.memory import memory_figure
from ddp_lab.analysis.report.figures.times import loss_figure
from ddp_lab.analysis.report.page import Block, cell, render, titled, write_page
from ddp_lab.analysis.report.pages.heads import audit_lines, banner, labels
from ddp_lab.analysis.report.pages.opening import opening
from ddp_lab.analysis.sentences import say
from ddp_lab.collectives.kinds import LABELS
from ddp_lab.writing import write_text

HOW_IT_WORKS = Path(__file__).parents[4] / "docs" / "how-it-works" / "README.md"
FIGURE = CsvColumn("figure", "", "value of each strategy")
VALUE = CsvColumn("value", "", "value of every strategy")


@dataclass(frozen=True)
class Compared:
    """What `compare.html` shows.

    Attributes:
        records: Run record by label (the choice, with the backend if it is not the default), in display order.
        traced: What their traces say; a choice may have none.
        reference: The choice that ratios refer to.
        failed: Choices without a result.
        differences: What the runs differ in besides their choice, as the user allowed.
        incomplete: Choices without traces of some ranks. The page shows no figures of their traces.
        unfinished: How far the sweep got, if it is not complete.
    """

    records: Mapping[str, dict[str, Any]]
    traced: Mapping[str, Traced]
    reference: str
    failed: Sequence[str]
    differences: Sequence[Difference]
    incomplete: Sequence[str] = ()
    unfinished: str = ""

    @cached_property
    def table(self) -> pd.DataFrame:
        return comparison(self.records, self.traced, self.reference, self.across_classes)

    @property
    def first(self) -> dict[str, Any]:
        """A record, for what is alike in all."""
        return next(iter(self.records.values()))

    @property
    def across_classes(self) -> bool:
        """Whether the user allowed runs over different backend classes to be compared."""
        return any(difference.name == BACKEND_CLASS for difference in self.differences)

    @property
    def unsteady(self) -> list[str]:
        """A sentence on each group of runs between which the machine changed."""
        return [line for group in self.groups if (line := unsteady(group, self.reference))]

    @property
    def unknown(self) -> str:
        """A sentence on why some verdicts are not known; empty if all are."""
        rows = self.table[self.table["verdict"] == UNKNOWN]
        return say("not_known", self.reference, rows, FEWEST_STEPS) if len(rows) else ""

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """What each group of runs concludes."""
        affects, outcomes = affected(self.differences), []
        for group in self.groups:
            rows = self.table[self.table["choice"].isin(list(group))]
            rows.attrs = self.table.attrs
            best = fastest(rows)
            works = {work_of(record) for record in group.values()}
            over = f"Over {next(iter(group.values()))['backend_class']}: " if len(self.groups) > 1 else ""
            equal_compute = len(works) == 1 and None not in works
            outcomes.append(conclude(rows, standings(group, best) if best else {}, affects, equal_compute, over))
        return outcomes

    @property
    def groups(self) -> list[dict[str, dict[str, Any]]]:
        """Records of the runs that are compared with each other."""
        return by_class(self.records, self.across_classes)


def write_comparison(compared: Compared, folder: Path) -> Path:
    """Write `compare.csv`, `compare.json` and `compare.html` into `folder`, and return the page's path.

    Raises:
        UserError: they cannot be written.
    """
    write_csv(folder / "compare.csv", compared.table)
    write_text(folder / "compare.json", as_json(compared.outcomes))
    page = folder / "compare.html"
    written = [*compared.traced, *compared.incomplete]
    linked = [choice for choice in written if (folder / choice / "summary.html").exists()]
    docs = quote(os.path.relpath(HOW_IT_WORKS, folder)) if HOW_IT_WORKS.exists() else ""  # of a checkout
    write_page(page, comparison_page(compared, linked, docs))
    return page


def comparison_page(compared: Compared, linked: Collection[str] = (), docs: str = "") -> str:
    """What every reader needs first, and below it what explains it, folded.

    Args:
        linked: Choices whose `summary.html` is in a folder beside the page.
        docs: Where the page on how choices work is, from the folder of this page.
    """
    lines = [
        say("workload", compared.first, [class_of(next(iter(group.values()))) for group in by_class(compared.records)]),
        say("no_result", compared.failed),
        say("not_traced", compared.incomplete),
        *compared.unsteady,
        *audit_lines({choice: run.failed_checks for choice, run in compared.traced.items()}),
    ]
    warnings = [compared.unfinished, banner(compared.differences, "strategy")]
    return render(
        "Strategies side by side",
        [*filter(None, lines)],
        blocks(compared),
        " ".join(filter(None, warnings)),
        opening(compared.outcomes, compared.table, linked, docs),
    )


def blocks(compared: Compared) -> list[Block]:
    """The blocks that explain the first screen. All but the drawn steps are folded."""
    table, records, traced = compared.table, compared.records, compared.traced
    differ, alike = figures(table)
    remembered = table.dropna(subset=["peak_bytes", "model_states_bytes"])
    rivals = table[table["choice"] != compared.reference].dropna(subset=["loss_difference"])
    unit, first = table.attrs["loss_unit"], compared.first
    losses_apart = rivals.set_index("choice")["loss_difference"], unit, len(first["train_loss"])
    tested = EXPECTED_SPREAD, EXPECTED_DEGREES, LEVEL, len(compared.groups) > 1, not compared.differences
    notes = dict.fromkeys(line for record in records.values() for line in labels(record))
    return [
        Block(
            "One step of each strategy",
            lambda: say("drawn", traced),
            bool(traced),
            figure=lambda: lanes_by_choice_figure(traced),
        ),
        Block("All figures", lambda: say("utilization", first, peak_of(first)), table=lambda: differ, folded=True),
        Block("Figures that are the same for all", table=lambda: alike, folded=True),
        Block(
            "Memory",
            lambda: say("memory_of_strategies"),
            len(remembered) > 0,
            figure=lambda: memory_figure(remembered["choice"], remembered),
            folded=True,
        ),
        Block(
            "Training loss",
            lambda: say("losses", compared.reference, *losses_apart),
            figure=lambda: loss_figure(records, unit),
            folded=True,
        ),
        Block("How this was measured and tested", lambda: " ".join([say("tested", *tested), *notes]), folded=True),
    ]


def figures(table: pd.DataFrame) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two tables of the CSV's columns: those that differ between strategies, and those that are the same for all.

    Empty columns and kinds of collectives that did not run are left out. Pointing at the name of a figure shows what it
    means, and its name in the CSV file.
    """
    silent = LABELS.keys() - kinds_run(table)
    differ: list[list[dict[str, Any]]] = []
    alike: list[list[dict[str, Any]]] = []
    rows = table.to_dict("records")
    ratio_of = {ratio: name for name, ratio in RATIOS.items()}
    columns = columns_of(table)
    for name, column in columns.items():
        if name != "choice" and table[name].notna().any() and kind_of(name) not in silent:
            label = f"ratio of {columns[ratio_of[name]].label}" if name in ratio_of else column.label
            figure = cell("", f"{label}, {column.unit}" if column.unit else label, FIGURE)
            values = [cell(name, row[name], column) for row in rows]
            is_alike = len(rows) > 1 and len({value["value"] for value in values}) == 1
            section, shown = (alike, values[:1]) if is_alike else (differ, values)
            section.append([figure | {"meaning": f"{column.meaning} ({name} in compare.csv)"}, *shown])
    choices = [CsvColumn(row["choice"], "", "") for row in rows]
    return titled("all", [FIGURE, *choices], differ), titled("alike", [FIGURE, VALUE], alike)
