"""Bars and lines of step times, their parts, and losses: one for each choice, run or rank."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from ddp_lab.analysis.comparison.compare import timed_steps_ms
from ddp_lab.analysis.report.figures import BAR_HEIGHT_PX, COLOURS, LINE_COLOURS, styled

PARTS = {
    "compute_ms": ("compute", COLOURS["compute"], ""),
    "exposed_wait_ms": ("exposed: waiting for the last rank", COLOURS["exposed"], "/"),
    "exposed_transfer_ms": ("exposed: transfer", COLOURS["exposed"], ""),
    "exposed_copy_ms": ("exposed memory copies", COLOURS["memory copy"], ""),
    "idle_ms": ("idle", COLOURS["idle"], ""),
}
"""The parts of a step: name, colour and hatching."""
LOSS, SHOWN_LOSS = "training loss, nats", "%{y:.4f} nats, mean over the global batch"
DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")


def parts_figure(names: Iterable[str], table: pd.DataFrame) -> go.Figure:
    """A bar a row of `table`: the parts of a mean step under the profiler, in ms."""
    figure = go.Figure()
    if table["exposed_wait_ms"].isna().all() and "exposed_ms" in table:  # an incomplete run: the last rank is unknown
        table = table.assign(exposed_transfer_ms=table["exposed_ms"])
    for column, (name, colour, hatching) in PARTS.items():
        if table[column].any():
            figure.add_bar(
                y=list(names),
                x=table[column],
                name=name,
                orientation="h",
                marker={"color": colour, "pattern": {"shape": hatching}},
                hovertemplate="%{y}: %{x:.1f} ms a step, " + name + "<extra></extra>",
            )
    figure.update_layout(barmode="stack", height=130 + BAR_HEIGHT_PX * len(table))
    figure.update_xaxes(title="ms a step, under the profiler")
    figure.update_yaxes(autorange="reversed")
    return styled(figure)


def loss_figure(records: Mapping[str, dict[str, Any]]) -> go.Figure:
    """Training loss over optimizer steps. Lines of choices that compute the same lie on top of each other."""
    losses = {name: pd.Series(record["train_loss"], dtype=float) for name, record in records.items()}
    return lines_figure(losses, LOSS, f"step %{{x}}: {SHOWN_LOSS}")


def step_times_figure(records: Mapping[str, dict[str, Any]]) -> go.Figure:
    """Step time over optimizer steps, with a gap for profiled steps."""
    times = {name: timed_steps_ms(record) for name, record in records.items()}
    gapped = {name: series.reindex(range(1, len(records[name]["step_time_s"]))) for name, series in times.items()}
    shown = "step %{x}: %{y:.1f} ms on rank 0, outside the profiler"
    return lines_figure(gapped, "step time, ms", shown).update_yaxes(rangemode="tozero")


def lines_figure(lines: Mapping[str, pd.Series], title: str, shown: str) -> go.Figure:
    """A line a choice over optimizer steps, which are the index of each series."""
    figure = go.Figure()
    for index, (name, series) in enumerate(lines.items()):
        figure.add_scatter(
            x=series.index,
            y=series,
            name=name,
            mode="lines",
            line={"dash": DASHES[index % len(DASHES)], "color": LINE_COLOURS[index % len(LINE_COLOURS)]},
            hovertemplate=f"{name}, {shown}<extra></extra>",
        )
    figure.update_xaxes(title="optimizer step")
    figure.update_yaxes(title=title)
    figure.update_layout(height=360, showlegend=True)
    return styled(figure)
