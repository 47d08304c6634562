"""The report on all choices side by side: `compare.html` and `compare.csv`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.columns import COMPARISON_COLUMNS
from analysis.report.figures import breakdown_figure, loss_figure, step_time_figure
from analysis.report.page import Section, drawing, render, table
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
        Section("Step time", figure=drawing(step_time_figure(comparison))),
        Section(
            "All figures",
            f"Ratios are to {reference}. Hover over a heading for its meaning.",
            table=table("compare", comparison, COMPARISON_COLUMNS),
        ),
    ]
    traced = comparison.dropna(subset=["compute_pct"])
    if len(traced):
        figure = drawing(breakdown_figure(traced["choice"].tolist(), traced))
        text = "Shares of the profiled steps, mean over ranks (HTA). Exposed: communication ran and compute did not."
        sections.append(Section("Where the time went", text, figure=figure))
    sections.append(Section("Training loss", figure=drawing(loss_figure(records))))
    return render("Strategies side by side", lines, sections)
