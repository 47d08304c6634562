"""The report on all choices side by side: `compare.html` and `compare.csv`."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from ddp_lab.analysis.columns import COMPARISON_COLUMNS, Column, kinds_run
from ddp_lab.analysis.comparison.compare import RATIOS, UNKNOWN, comparison, standings, unsteady
from ddp_lab.analysis.comparison.fairness import BACKEND_CLASS, Difference, affected, by_class, class_of
from ddp_lab.analysis.comparison.outcome import Outcome, conclude, fastest
from ddp_lab.analysis.comparison.timing import work_of
from ddp_lab.analysis.comparison.traced import Traced
from ddp_lab.analysis.files import write_csv
from ddp_lab.analysis.metrics.significance import EXPECTED_DEGREES, EXPECTED_SPREAD, FEWEST_STEPS, LEVEL
from ddp_lab.analysis.metrics.utilization import peak_of
from ddp_lab.analysis.report.figures.lanes_figure import lanes_by_choice_figure
from ddp_lab.analysis.report.figures.memory import memory_figure
from ddp_lab.analysis.report.figures.times import loss_figure
from ddp_lab.analysis.report.page import Section, cell, drawing, render, titled, write_page
from ddp_lab.analysis.report.pages.heads import audit_lines, banner, labels
from ddp_lab.analysis.report.pages.opening import opening
from ddp_lab.analysis.sentences import say
from ddp_lab.collectives.kinds import LABELS
from ddp_lab.runtime.errors import listed

HOW_TESTED = (
    "The unit is a run, since steps of one run share what the next run has otherwise. Step k of every choice trains on "
    "the same samples, so in each pass a ratio is the median over steps; the estimate is their mean over passes. The "
    f"spread of a run is what neither choice nor pass explains, with {EXPECTED_SPREAD:.0%} expected before any run "
    f"({EXPECTED_DEGREES} degrees of freedom; a moderated t-test, corrected by Holm). A choice is faster or slower if "
    f"p is at most {LEVEL:g}, and if it is so in every pass."
)
NOT_ACROSS = (
    "These runs are over more than one backend class, or share GPUs differently, and both change step times "
    "(docs/status.md, docs/gpu.md). So these are compared only among runs that are alike in both."
)
HOW_DRAWN = (
    "The median step of each choice, on its median rank. Collectives are hidden where they lie under compute; "
    "elsewhere the choice's own lane shows exposed communication. Drawn: "
)
HOW_IT_WORKS = Path(__file__).parents[4] / "docs" / "how-it-works" / "README.md"
FIGURE = Column("figure", "", "what it is of each choice")
VALUE = Column("value", "", "of every choice")


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
        unfinished: How far the sweep got, if it is not whole.
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
    def across_classes(self) -> bool:
        """Whether the user allowed runs over different backend classes to be compared."""
        return any(difference.name == BACKEND_CLASS for difference in self.differences)

    @property
    def unsteady(self) -> list[str]:
        """A sentence on each group of runs between which the machine changed."""
        return [line for group in self.groups if (line := unsteady(group, self.reference_in(group)))]

    def reference_in(self, group: Mapping[str, dict[str, Any]]) -> str:
        """The label of the reference in a group of runs; empty without one."""
        return next((label for label, record in group.items() if record["choice"] == self.reference), "")

    @property
    def unknown(self) -> list[str]:
        """A sentence on why some verdicts are not known; empty if all are."""
        if not len(open_ones := self.table[self.table["verdict"] == UNKNOWN]):
            return []
        few = open_ones.loc[open_ones["passes"] == 0, "choice"].tolist()
        widest = (open_ones["paired_ratio_high"] / open_ones["paired_ratio"] - 1).max()
        few = None if open_ones["passes"].isna().any() else few
        return [say("not_known", self.reference, open_ones["choice"].tolist(), few, widest, FEWEST_STEPS)]

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
    """Write `compare.csv` and `compare.html` into `folder`, and return the page's path.

    Raises:
        UserError: they cannot be written.
    """
    write_csv(folder / "compare.csv", compared.table)
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
    parted = len(compared.groups) > 1
    more = [NOT_ACROSS] if parted else []
    if not compared.differences:
        more.append("In all other settings that are compared, the runs agree, as far as their records say.")
    more += dict.fromkeys(line for record in compared.records.values() for line in labels(record))
    losses = loss_figure(compared.records, compared.table.attrs["loss_unit"])
    folded = [
        *figures_sections(compared),
        *memory_section(compared.table),
        Section(
            "Training loss",
            loss_text(compared),
            figure=drawing(losses),
        ),
        Section("How this was measured and tested", " ".join([HOW_TESTED, *more])),
    ]
    return render(
        "Strategies side by side",
        summary_lines(compared),
        [*lanes_section(compared.traced), *(replace(section, folded=True) for section in folded)],
        " ".join(filter(None, (compared.unfinished, banner(compared.differences, "choice")))),
        opening(compared.outcomes, compared.table, linked, docs),
    )


def summary_lines(compared: Compared) -> list[str]:
    """What was run, in a line, and what went wrong."""
    first = next(iter(compared.records.values()))
    config = first["config"]
    link = "" if (rate := config.get("link", "none")) == "none" else f", simulated links of {rate}"
    classes = listed([class_of(next(iter(group.values()))) for group in by_class(compared.records)])
    size = first["parameters"]
    parameters = f"{size / 1e6:.1f} M" if size >= 1e5 else f"{size / 1e3:.1f} thousand"
    lines = [
        f"Workload {config['workload']} ({parameters} parameters), {first['world_size']} ranks "
        f"over {first['backend']} ({classes}) on {first['device_name']}{link}; "
        f"global batch {config['global_batch_size']} samples in {config['grad_accum_steps']} micro-batches a rank, "
        f"{config['precision']}.",
    ]
    if compared.failed:
        lines.append(f"No result from: {', '.join(compared.failed)}.")
    if compared.incomplete:
        lines.append(
            f"Without figures of traces, since traces of some ranks are missing: {', '.join(compared.incomplete)}."
        )
    lines += compared.unsteady
    return lines + audit_lines({choice: kept.failed_checks for choice, kept in compared.traced.items()})


def figures_sections(compared: Compared) -> list[Section]:
    """All columns of the CSV but empty ones and kinds of collectives that did not run: those that differ, and others.

    What a figure means, and its name in the CSV file, is told when its own name is pointed at.
    """
    table = compared.table
    silent = tuple(f"{kind}_" for kind in LABELS if kind not in kinds_run(table))
    differ: list[list[dict[str, Any]]] = []
    alike: list[list[dict[str, Any]]] = []
    rows = table.to_dict("records")
    ratio_of = {ratio: name for name, ratio in RATIOS.items()}
    for name, column in COMPARISON_COLUMNS.items():
        if name != "choice" and table[name].notna().any() and not name.startswith(silent):
            label = f"ratio of {COMPARISON_COLUMNS[ratio_of[name]].label}" if name in ratio_of else column.label
            unit = table.attrs["loss_unit"] if column.unit == "nats" else column.unit
            figure = cell("", f"{label}, {unit}" if unit else label, FIGURE)
            values = [cell(name, row[name], column) for row in rows]
            is_alike = len(rows) > 1 and len({value["value"] for value in values}) == 1
            kept, shown = (alike, values[:1]) if is_alike else (differ, values)
            kept.append([figure | {"meaning": f"{column.meaning} ({name} in compare.csv)"}, *shown])
    choices = [Column(row["choice"], "", "") for row in rows]
    sections = [Section("All figures", utilization_text(compared), table=titled("all", [FIGURE, *choices], differ))]
    return sections + [Section("Figures that are the same for all", table=titled("alike", [FIGURE, VALUE], alike))]


def utilization_text(compared: Compared) -> str:
    """What model FLOPs and their utilization are of."""
    record = next(iter(compared.records.values()))
    text = "Point at a figure's name for its meaning."
    peak, device = peak_of(record), record["device_name"]
    if peak is None:
        return f"{text} No utilization (MFU): ddp_lab/planner/hardware.toml has no peak of {device}."
    return (
        f"{text} MFU is the share of {record['world_size']} times {peak.flops_per_second / 1e12:g} TFLOP/s, "
        f"the peak of {device} in {peak.dtype} ({peak.source})."
    )


def lanes_section(traced: Mapping[str, Traced]) -> list[Section]:
    """One step of each choice that has traces."""
    if not traced:
        return []
    drawn = "; ".join(f"{name}, rank {kept.timeline.rank}, step {kept.step}" for name, kept in traced.items())
    return [Section("One step of each choice", f"{HOW_DRAWN}{drawn}.", figure=drawing(lanes_by_choice_figure(traced)))]


def memory_section(comparison: pd.DataFrame) -> list[Section]:
    """Memory by component, of the choices that have it recorded."""
    recorded = comparison.dropna(subset=["peak_bytes", "model_states_bytes"])
    if not len(recorded):
        return []
    text = (
        "Model states at rest, on the rank that has most. Grey: the peak in a step. Line: the formula of what a choice "
        "shards, at rest."
    )
    return [Section("Memory", text, figure=drawing(memory_figure(recorded["choice"], recorded)))]


def loss_text(compared: Compared) -> str:
    """The largest difference between losses, which lie on top of each other in the figure."""
    known = compared.table[compared.table["choice"] != compared.reference].dropna(subset=["loss_difference"])
    if not len(known):
        return f"No losses of {compared.reference} to compare with."
    apart = known.set_index("choice")["loss_difference"]
    return (
        f"At no step does a choice's loss differ from {compared.reference}'s by more than {apart.max():.1e} "
        f"{compared.table.attrs['loss_unit']} ({apart.idxmax()}).".replace("  ", " ")
    )
