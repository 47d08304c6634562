"""The report on all choices side by side: `compare.html` and `compare.csv`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.columns import CHOICE, HELD_COLUMNS, OUTCOME_COLUMNS, SHARE_COLUMNS, SPEED_COLUMNS
from analysis.report.figures import breakdown_figure, loss_figure, step_time_figure
from analysis.report.memory_figures import memory_by_choice_figure
from analysis.report.page import Section, drawing, render, table
from analysis.report.tradeoff_figure import tradeoff_figure
from analysis.summary import write_text


def write_comparison(
    comparison: pd.DataFrame, records: dict[str, dict[str, Any]], reference: str, failed: Sequence[str], folder: Path
) -> Path:
    """Write `compare.csv` and `compare.html` into `folder`, and answer with the page's path.

    Args:
        reference: The choice that ratios refer to.
        failed: Choices that gave no result; the page names them.

    Raises:
        TraceError: they cannot be written.
    """
    write_text(folder / "compare.csv", comparison.to_csv(index=False))
    page = folder / "compare.html"
    write_text(page, comparison_page(comparison, records, reference, failed))
    return page


def comparison_page(
    comparison: pd.DataFrame, records: dict[str, dict[str, Any]], reference: str, failed: Sequence[str]
) -> str:
    first = next(iter(records.values()))
    config = first["config"]
    lines = [
        f"Workload {config['workload']} ({first['parameters'] / 1e6:.1f} M parameters), {first['world_size']} ranks "
        f"over {first['backend']} on {first['device_name']}; global batch {config['global_batch_size']} samples in "
        f"{config['grad_accum_steps']} micro-batches a rank, {config['precision']}.",
        "Every choice trains the same model on the same samples: equal loss curves are part of the result.",
    ]
    if failed:
        lines.append(f"No result from: {', '.join(failed)}.")
    sections = [
        *tradeoff_section(comparison, reference),
        Section(
            "Step time",
            f"Ratios are to {reference}. Hover over a heading for its meaning.",
            table=table("speed", comparison, CHOICE | SPEED_COLUMNS),
            figure=drawing(step_time_figure(comparison)),
        ),
        *memory_section(comparison),
    ]
    traced = comparison.dropna(subset=["compute_pct"])
    if len(traced):
        sections.append(
            Section(
                "Where the time went",
                "Shares of the profiled steps, mean over ranks (HTA). Exposed: communication ran and compute did not. "
                "Overlap: share of communication time in which compute ran as well.",
                table=table("shares", comparison, CHOICE | SHARE_COLUMNS),
                figure=drawing(breakdown_figure(traced["choice"].tolist(), traced)),
            )
        )
    sections.append(
        Section(
            "Training loss",
            table=table("outcome", comparison, CHOICE | OUTCOME_COLUMNS),
            figure=drawing(loss_figure(records)),
        )
    )
    return render("Strategies side by side", lines, sections)


def tradeoff_section(comparison: pd.DataFrame, reference: str) -> list[Section]:
    """Memory against time, of the choices that have both."""
    recorded = comparison.dropna(subset=["peak_bytes", "model_states_bytes", "step_time_ms_median"])
    if not len(recorded):
        return []
    text = (
        "Lower is leaner, further left is faster. A mark is the most that a rank's tensors took in a step; the dash "
        "below it is what the rank's model states take between steps."
    )
    figure = drawing(tradeoff_figure(recorded, reference))
    return [Section("Memory against step time", text, figure=figure)]


def memory_section(comparison: pd.DataFrame) -> list[Section]:
    """Memory by component, of the choices that have it recorded."""
    recorded = comparison.dropna(subset=["peak_bytes", "model_states_bytes"])
    drawn = drawing(memory_by_choice_figure(recorded)) if len(recorded) else None
    text = (
        "Model states at rest by component, with the peak of a step behind them in grey; black line: what the formula "
        "expects at rest of what a choice shards, without padding. Each is of the rank that has most."
    )
    return [Section("Memory", text, table=table("memory", comparison, CHOICE | HELD_COLUMNS), figure=drawn)]
