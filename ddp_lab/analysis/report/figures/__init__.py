"""Plotly figures, and what they share. A colour means the same in every figure (`colours.toml`)."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from ddp_lab.analysis.report.page import readable

_CONTENT = tomllib.loads(Path(__file__).with_name("colours.toml").read_text())
COLOURS, MEMORY_COLOURS, TEXT_COLOURS, LANE_NAMES = (_CONTENT[name] for name in ("time", "memory", "text", "names"))
LINE_COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#999999")
"""Lines that stand for a choice each."""
OUTLIER = 4.0
"""A value this many times as large as most others is cut off, and written at the end of the axis."""
BAR_HEIGHT_PX = 28
LANE_HEIGHT_PX = 30


def styled(figure: go.Figure) -> go.Figure:
    """The style of all figures. The page's script adds fonts and the colours of its theme.

    A drag zooms along x if the figure's `meta` has `zooms`, up to `whole`; otherwise it scrolls the page.
    """
    zooms = bool((figure.layout.meta or {}).get("zooms"))
    figure.update_layout(
        template="none",
        margin={"l": 10, "r": 20, "t": 20, "b": 45},
        legend={
            "orientation": "h",
            "traceorder": "normal",
            **{"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top"},
        },
        dragmode="zoom" if zooms else False,
    )
    figure.update_xaxes(fixedrange=not zooms)
    figure.update_yaxes(automargin=True, fixedrange=True)
    return figure


def axis_end(values: Iterable[float], most: float = 0.75) -> float:
    """Where an axis from 0 ends: at the largest value, or below outliers that would flatten all others.

    Outliers are above `OUTLIER` times the quantile `most` of the values, rounded down to one of them. Zeros and unknown
    values do not count; without other values the axis ends at 1.
    """
    ordered = np.sort(np.fromiter(values, float))
    ordered = ordered[ordered > 0]
    if not len(ordered):
        return 1.0
    usual = ordered[ordered <= OUTLIER * ordered[int(most * (len(ordered) - 1))]]
    return float(ordered[-1] if len(usual) == len(ordered) else 1.25 * usual[-1])


def clip_bars(figure: go.Figure, ends: Mapping[str, float], texts: Iterable[str], room: float = 1.0) -> float:
    """End the x axis of horizontal bars at `axis_end`, which it returns, and write the text of a longer bar there.

    Args:
        ends: Where each bar ends, by its place on the y axis.
        room: The axis is this many times as long as that.
    """
    end = axis_end(ends.values())
    figure.update_xaxes(range=[0, end * room])
    for (place, value), text in zip(ends.items(), texts, strict=True):
        if value > end:
            mark = {"text": f"▸ {text}", "showarrow": False, "bgcolor": "var(--paper)", "borderpad": 2}
            figure.add_annotation(x=1, xref="x domain", xanchor="right", y=place, **mark)
    return end


def literal(text: str) -> str:
    """A foreign name that Plotly shows letter by letter (it interprets some tags), cut to what fits."""
    return readable(text, 60).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
