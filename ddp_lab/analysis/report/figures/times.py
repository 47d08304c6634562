"""Bars and lines of step times, their parts, and losses: one for each choice, run or rank."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ddp_lab.analysis.comparison.compare import IS_REFERENCE, elapsed_s, timed_steps_ms
from ddp_lab.analysis.report.figures import BAR_HEIGHT_PX, COLOURS, LINE_COLOURS, styled

PARTS = {
    "compute_ms": ("compute", COLOURS["compute"], ""),
    "exposed_wait_ms": ("exposed: waiting for the last rank", COLOURS["exposed"], "/"),
    "exposed_transfer_ms": ("exposed: transfer", COLOURS["exposed"], ""),
    "exposed_copy_ms": ("exposed memory copies", COLOURS["memory copy"], ""),
    "idle_ms": ("idle", COLOURS["idle"], ""),
}
"""The parts of a step: name, colour and hatching."""
VERDICT_SYMBOLS = {"faster": "triangle-left", "slower": "triangle-right", "no difference seen": "circle"}
LOSS, SHOWN_LOSS = "training loss, nats", "%{y:.4f} nats, mean over the global batch"
DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")


def step_time_figure(table: pd.DataFrame) -> go.Figure:
    """Median step time of each choice, with whiskers from p25 to p75.

    A second panel has the ratios to the reference with their intervals, if there are any.
    """
    judged = table.dropna(subset=["paired_ratio"])
    panels = {"cols": 2, "shared_yaxes": True, "horizontal_spacing": 0.04, "column_widths": [0.58, 0.42]}
    figure = make_subplots(**panels if len(judged) else {})
    median = table["step_time_ms_median"]
    figure.add_bar(
        y=table["choice"],
        x=median,
        error_x=whisker(median, table["step_time_ms_p25"], table["step_time_ms_p75"]),
        orientation="h",
        marker={"color": COLOURS["compute"]},
        customdata=table[["timed_steps"]],
        hovertemplate="%{y}: %{x:.1f} ms, median of %{customdata[0]} steps on rank 0, outside the profiler"
        "<extra></extra>",
        row=1,
        col=1,
    )
    figure.update_xaxes(title="step time, ms (whiskers: p25 to p75)", rangemode="tozero", row=1, col=1)
    if len(judged):
        draw_ratios(figure, judged, table.loc[table["verdict"] == IS_REFERENCE, "choice"])
    figure.update_layout(height=130 + BAR_HEIGHT_PX * len(table), showlegend=False)
    figure.update_yaxes(autorange="reversed")
    return styled(figure)


def draw_ratios(figure: go.Figure, judged: pd.DataFrame, references: Iterable[str]) -> None:
    """The second panel of `step_time_figure`."""
    ratio = judged["paired_ratio"]
    symbols = judged["verdict"].map(VERDICT_SYMBOLS).fillna("circle-open")
    figure.add_scatter(
        y=judged["choice"],
        x=ratio,
        error_x=whisker(ratio, judged["paired_ratio_low"], judged["paired_ratio_high"]),
        mode="markers",
        marker={"color": "var(--ink)", "size": 9, "symbol": symbols},
        customdata=judged[["paired_ratio_low", "paired_ratio_high", "pairs", "verdict"]],
        hovertemplate="%{y}: %{customdata[3]}, %{x:.3f} times the reference's step time (95 % interval "
        "%{customdata[0]:.3f} to %{customdata[1]:.3f}, %{customdata[2]} pairs of steps)<extra></extra>",
        row=1,
        col=2,
    )
    figure.add_vline(x=1, line={"color": COLOURS["other compute"], "dash": "dash"}, row=1, col=2)
    for name in references:
        figure.add_annotation(x=1, y=name, text="reference", showarrow=False, bgcolor="var(--paper)", row=1, col=2)
    figure.update_xaxes(title="step time over the reference's, × (95 % interval)", row=1, col=2)


def whisker(middle: pd.Series, low: pd.Series, high: pd.Series) -> dict[str, Any]:
    return {"type": "data", "symmetric": False, "array": high - middle, "arrayminus": middle - low}


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


def loss_over_time_figure(records: Mapping[str, dict[str, Any]]) -> go.Figure:
    """Training loss over the time of the steps so far: the same losses, and who comes to them first."""
    lines = {}
    for name, record in records.items():
        known = pd.DataFrame({"s": elapsed_s(record), "loss": pd.Series(record["train_loss"], dtype=float)}).dropna()
        lines[name] = known.set_index("s")["loss"]
    figure = lines_figure(lines, LOSS, f"%{{x:.2f}} s: {SHOWN_LOSS}")
    return figure.update_xaxes(title="training time, s", rangemode="tozero")


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
