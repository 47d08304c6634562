"""Bandwidth of a run's own collectives over message size: the figure and its table."""

import pandas as pd
import plotly.graph_objects as go

from analysis.columns import BANDWIDTH_COLUMNS
from analysis.metrics.bandwidth import bandwidth_by_size, bandwidths, binary_size, size_class
from analysis.report.figures import COLOURS, styled
from analysis.report.page import Section, drawing, table
from analysis.traces.collectives import KINDS

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "star", "cross", "x", "pentagon")
MEDIAN_COLOUR = "#8C8C8C"
MOST_POINTS = 400
"""Collectives of a kind that are drawn one by one; of more, every n-th. Medians are over all."""

TICKS = {2.0**power: binary_size(2.0**power) for power in range(2, 41, 4)}


def bandwidth_section(collectives: pd.DataFrame) -> Section:
    known = bandwidths(collectives)
    heading = "Bandwidth of the collectives"
    if known.empty:
        return Section(heading, "Unknown: sizes or the arrivals of all ranks are not in the traces.")
    rows = bandwidth_by_size(known)
    shown = rows.assign(
        size_bytes=rows["size_bytes"].map(size_class), kind=rows["kind"].map(KINDS).fillna(rows["kind"])
    )
    return Section(
        heading,
        "From the last rank's arrival to the last rank's end; algbw is the payload over that time, busbw is that times "
        "nccl-tests' factor, so that it can be held against the rate of a link whatever the kind and the number of "
        "ranks. Is it good? A median near the best of its size was seldom disturbed; one far below lost time to other "
        "work on the cores or to collectives under way at the same time, which share the link. Small messages stay far "
        "below large ones, as a call takes some time however little it carries. The best is this run's own: for what "
        "the link can do, hold busbw of the largest sizes against its rate, or against nccl-tests on the same ranks.",
        table=table("bandwidth", shown, BANDWIDTH_COLUMNS),
        figure=drawing(bandwidth_figure(known, rows)),
    )


def bandwidth_figure(known: pd.DataFrame, rows: pd.DataFrame) -> go.Figure:
    """Busbw of collectives over their payload, both logarithmic; a line through the medians of each kind."""
    figure = go.Figure()
    for kind, symbol in zip(KINDS, SYMBOLS, strict=True):
        calls, medians = known[known["kind"] == kind], rows[rows["kind"] == kind]
        if calls.empty:
            continue
        drawn = calls.iloc[:: -(-len(calls) // MOST_POINTS)]
        figure.add_scatter(
            x=drawn["bytes"].tolist(),
            y=drawn["busbw_gbps"].tolist(),
            customdata=drawn[["done_after_ms", "algbw_gbps", "step"]].to_numpy().tolist(),
            name=KINDS[kind],
            legendgroup=kind,
            mode="markers",
            marker={"color": COLOURS["communication"], "symbol": symbol, "size": 7, "opacity": 0.5},
            hovertemplate="%{x:,} bytes in %{customdata[0]:.3f} ms, step %{customdata[2]}<br>busbw %{y:.3g} GB/s, "
            "algbw %{customdata[1]:.3g} GB/s<extra>" + KINDS[kind] + "</extra>",
        )
        figure.add_scatter(
            x=medians["bytes"].tolist(),
            y=medians["busbw_gbps"].tolist(),
            name=f"{KINDS[kind]}, median by size",
            legendgroup=kind,
            mode="lines+markers",
            line={"color": MEDIAN_COLOUR, "width": 1},
            marker={"color": MEDIAN_COLOUR, "symbol": f"{symbol}-open", "size": 11},
            hovertemplate="median busbw %{y:.3g} GB/s<extra>" + KINDS[kind] + "</extra>",
        )
    figure.update_xaxes(type="log", title="payload", tickvals=list(TICKS), ticktext=list(TICKS.values()))
    figure.update_yaxes(type="log", title="busbw, GB/s", exponentformat="none", dtick="D2")
    figure.update_layout(height=420)
    return styled(figure)
