"""The report on all choices side by side: `compare.html` and `compare.csv`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ddp_lab.analysis.columns import (
    CHOICE,
    HELD_COLUMNS,
    OUTCOME_COLUMNS,
    PART_COLUMNS,
    SHARE_COLUMNS,
    SPEED_COLUMNS,
    TRAFFIC_COLUMNS,
    kinds_run,
)
from ddp_lab.analysis.comparison.compare import Traced, comparison, standings
from ddp_lab.analysis.comparison.conclusion import conclusion, fastest
from ddp_lab.analysis.comparison.fairness import BACKEND_CLASS, Difference, affected, by_class
from ddp_lab.analysis.errors import listed
from ddp_lab.analysis.files import write_csv, write_text
from ddp_lab.analysis.metrics.significance import FEWEST_PAIRS
from ddp_lab.analysis.metrics.utilization import peak_of
from ddp_lab.analysis.report.figures.lanes_figure import lanes_by_choice_figure
from ddp_lab.analysis.report.figures.memory import memory_figure
from ddp_lab.analysis.report.figures.times import loss_figure, loss_over_time_figure, parts_figure, step_time_figure
from ddp_lab.analysis.report.figures.tradeoff import tradeoff_figure
from ddp_lab.analysis.report.figures.traffic import traffic_figure
from ddp_lab.analysis.report.page import Section, drawing, render, table
from ddp_lab.analysis.report.pages.heads import audit_lines, banner, fairness_section, labels

HOW_PAIRED = (
    "Step k of every choice trains on the same samples, so step times are compared step by step, over batches of "
    "consecutive steps. Ratio and 95 % interval (of each comparison alone) are Hodges and Lehmann's; p is that of "
    "Wilcoxon's signed-rank test, corrected for the number of choices by Holm. A difference is seen if p is at most "
    f"0.05; below {FEWEST_PAIRS} pairs it is unknown. The limit: the choices ran one after the other, so a machine "
    "that was slower during one run changes these figures. benchmarks/strategies.py alternates choices inside one "
    "process group."
)
SAME_CLASS = " over the same backend class"
NOT_ACROSS = (
    "These runs are over more than one backend class. On a GPU the class decides whether PyTorch DDP overlaps its "
    "all-reduces with backward (docs/cuda.md), so step times are compared only among runs over one class."
)
HOW_DRAWN = (
    "One step of one rank of each choice on one time axis: the analysed step of median duration, and in it the rank of "
    "median duration (of an even number, the shorter of the middle two). Collectives: at least one ran. If they do not "
    "lie under compute, the choice's own lane shows exposed communication. Drawn: "
)


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
    """

    records: Mapping[str, dict[str, Any]]
    traced: Mapping[str, Traced]
    reference: str
    failed: Sequence[str]
    differences: Sequence[Difference]
    incomplete: Sequence[str] = ()

    @cached_property
    def table(self) -> pd.DataFrame:
        return comparison(self.records, self.traced, self.reference, self.across_classes)

    @property
    def across_classes(self) -> bool:
        """Whether the user allowed runs over different backend classes to be compared."""
        return any(difference.name == BACKEND_CLASS for difference in self.differences)

    @property
    def groups(self) -> list[dict[str, dict[str, Any]]]:
        """Records of the runs that are compared with each other."""
        return by_class(self.records, self.across_classes)


def write_comparison(compared: Compared, folder: Path) -> Path:
    """Write `compare.csv` and `compare.html` into `folder`, and return the page's path.

    Raises:
        TraceError: they cannot be written.
    """
    write_csv(folder / "compare.csv", compared.table)
    page = folder / "compare.html"
    write_text(page, comparison_page(compared))
    return page


def comparison_page(compared: Compared) -> str:
    first = next(iter(compared.records.values()))
    config = first["config"]
    classes = listed([next(iter(group.values()))["backend_class"] for group in by_class(compared.records)])
    lines = [
        f"Workload {config['workload']} ({first['parameters'] / 1e6:.1f} M parameters), {first['world_size']} ranks "
        f"over {first['backend']} ({classes}) on {first['device_name']}; "
        f"global batch {config['global_batch_size']} samples in {config['grad_accum_steps']} micro-batches a rank, "
        f"{config['precision']}.",
    ]
    lines += dict.fromkeys(line for record in compared.records.values() for line in labels(record))
    if len(compared.groups) > 1:
        lines.append(NOT_ACROSS)
    if not compared.differences:
        lines.append(
            "Every choice trains the same model on the same samples: equal loss curves are part of the result."
        )
    if compared.failed:
        lines.append(f"No result from: {', '.join(compared.failed)}.")
    if compared.incomplete:
        lines.append(
            f"Without figures of traces, since traces of some ranks are missing: {', '.join(compared.incomplete)}."
        )
    lines += audit_lines({choice: kept.failed_checks for choice, kept in compared.traced.items()})
    sections = [
        fairness_section(
            compared.differences,
            "choice and mesh" if compared.table["mesh"].nunique(dropna=False) > 1 else "choice",
            [BACKEND_CLASS] if len(compared.groups) > 1 else [],
        ),
        conclusion_section(compared),
        Section(
            "Step time",
            f"Ratios are to {compared.reference}{SAME_CLASS if len(compared.groups) > 1 else ''}. {HOW_PAIRED} "
            f"{utilization_text(first)}",
            table=table("speed", compared.table, CHOICE | SPEED_COLUMNS),
            figure=drawing(step_time_figure(compared.table)),
        ),
        *tradeoff_section(compared.table, compared.reference),
        *trace_sections(compared),
        memory_section(compared.table),
        *traffic_section(compared.table),
        loss_section(compared),
        Section(
            "Training loss over time",
            "The same losses over the wall time of the steps until then, the first one included. A step under the "
            "profiler counts as a median step.",
            figure=drawing(loss_over_time_figure(compared.records)),
        ),
    ]
    return render("Strategies side by side", lines, sections, banner(compared.differences, "choice"))


def with_mesh(comparison: pd.DataFrame) -> pd.DataFrame:
    """The table with a column for the mesh only if a run has one."""
    return comparison if comparison["mesh"].notna().any() else comparison.drop(columns="mesh")


def utilization_text(record: dict[str, Any]) -> str:
    """What model FLOPs and their utilization are of."""
    text = "Model FLOPs: what forward and backward of the samples need (docs/run-record.md), all ranks together."
    peak, device = peak_of(record), record["device_name"]
    if peak is None:
        return f"{text} There is no utilization (MFU), since ddp_lab/planner/hardware.toml has no peak of {device}."
    return (
        f"{text} MFU is their share of {record['world_size']} times {peak.flops_per_second / 1e12:g} TFLOP/s, "
        f"the peak of {device} in {peak.dtype} ({peak.source})."
    )


def conclusion_section(compared: Compared) -> Section:
    """In words, for each group of runs that are compared with each other."""
    texts = []
    for group in compared.groups:
        rows = compared.table[compared.table["choice"].isin(list(group))]
        best = fastest(rows)
        text = conclusion(rows, standings(group, best) if best else {}, affected(compared.differences))
        over = f"Over {next(iter(group.values()))['backend_class']}: " if len(compared.groups) > 1 else ""
        texts.append(over + text)
    return Section("What the figures say", " ".join(texts))


def tradeoff_section(comparison: pd.DataFrame, reference: str) -> list[Section]:
    """Memory against time, of the choices that have both."""
    recorded = comparison.dropna(subset=["peak_bytes", "model_states_bytes", "step_time_ms_median"])
    if not len(recorded):
        return []
    text = (
        "Lower needs less memory, further left is faster. A mark is the peak of a rank's tensors in a step; the dash "
        "below it is what the rank's model states take between steps."
    )
    return [Section("Memory against step time", text, figure=drawing(tradeoff_figure(recorded, reference)))]


def trace_sections(compared: Compared) -> list[Section]:
    """Parts of a step and lanes, of the choices that have traces."""
    traced = compared.table.dropna(subset=["profiled_step_ms"])
    if not len(traced):
        return []
    drawn = (f"{name}, rank {kept.timeline.rank}, step {kept.step}" for name, kept in compared.traced.items())
    return [
        Section(
            "Where the time went",
            "Means over ranks and profiled steps, which take longer than others; the parts in ms add up to the step. "
            "Waiting: a collective runs, compute does not, and the last rank has not arrived. Transfer: the same after "
            "its arrival. Shares in % are of the time from the first kernel to the last, by Holistic Trace Analysis "
            "(HTA). Overlap: the share of communication time in which compute ran as well.",
            table=table("parts", compared.table, CHOICE | PART_COLUMNS | SHARE_COLUMNS),
            figure=drawing(parts_figure(traced["choice"], traced)),
        ),
        Section(
            "One step of each choice",
            f"{HOW_DRAWN}{'; '.join(drawn)}.",
            figure=drawing(lanes_by_choice_figure(compared.traced)),
        ),
    ]


def memory_section(comparison: pd.DataFrame) -> Section:
    """Memory by component, of the choices that have it recorded."""
    recorded = comparison.dropna(subset=["peak_bytes", "model_states_bytes"])
    text = (
        "Model states at rest by component. Grey: the peak in a step. Line: the formula at rest of what a choice "
        "shards, without padding. Each figure is of the rank that has most."
    )
    drawn = drawing(memory_figure(recorded["choice"], recorded)) if len(recorded) else None
    return Section("Memory", text, table=table("memory", comparison, CHOICE | HELD_COLUMNS), figure=drawn)


def traffic_section(comparison: pd.DataFrame) -> list[Section]:
    """Calls and payload, of the kinds that ran."""
    kinds, traced = kinds_run(comparison), comparison.dropna(subset=["profiled_step_ms"])
    if not kinds:
        return []
    columns = {name: column for name, column in TRAFFIC_COLUMNS.items() if name.startswith(tuple(kinds))}
    return [
        Section(
            "Traffic",
            "Collectives of one optimizer step in the traces, mean over ranks. A payload is the whole tensor that is "
            "reduced, gathered or scattered, as nccl-tests counts it.",
            table=table("traffic", comparison, CHOICE | columns),
            figure=drawing(traffic_figure(traced["choice"], traced, ("calls", "bytes"))),
        )
    ]


def loss_section(compared: Compared) -> Section:
    """Losses on top of each other, and the largest difference between them."""
    known = compared.table[compared.table["choice"] != compared.reference].dropna(subset=["loss_difference"])
    text = f"No losses of {compared.reference} to compare with."
    if len(known):
        apart = known.set_index("choice")["loss_difference"]
        text = (
            f"At no step does a choice's loss differ from {compared.reference}'s by more than {apart.max():.1e} nats "
            f"({apart.idxmax()})."
        )
    return Section(
        "Training loss",
        text,
        table=table("outcome", with_mesh(compared.table), CHOICE | OUTCOME_COLUMNS),
        figure=drawing(loss_figure(compared.records)),
    )
