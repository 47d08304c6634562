"""Memory against step time: the figure by which a user chooses."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from ddp_lab.analysis.columns import MIB
from ddp_lab.analysis.report.figures import styled

WIDTH_PX, HEIGHT_PX = 1000, 520
LETTER_PX, LINE_PX, MARK_PX = 7.6, 18, 13
FAMILIES = {
    "hand-written": ("hand-written", "#0072B2", "circle"),
    "pytorch": ("PyTorch", "#D55E00", "square"),
    "deepspeed": ("DeepSpeed", "#009E73", "diamond"),
    "reference": ("", "var(--ink)", "star"),
}
"""Label, colour and symbol, by the part of a choice's name before the first underscore; others are hand-written."""


def tradeoff_figure(table: pd.DataFrame, reference: str) -> go.Figure:
    """A point a choice: median step time along x, peak memory along y, and below it the memory at rest."""
    points = table.dropna(subset=["step_time_ms_median", "peak_bytes"])
    x, y = points["step_time_ms_median"], points["peak_bytes"] * MIB
    rest = points["model_states_bytes"] * MIB
    figure = go.Figure()
    for left, top, bottom in zip(x, y, rest, strict=True):
        figure.add_shape(type="line", x0=left, x1=left, y0=bottom, y1=top, line={"color": "#BBBBBB", "width": 1.5})
    figure.add_scatter(
        x=x,
        y=rest,
        mode="markers",
        name="model states at rest",
        marker={"symbol": "line-ew", "size": MARK_PX, "line": {"width": 2.5, "color": "#777777"}},
        customdata=points["choice"],
        hovertemplate="%{customdata}: model states at rest %{y:.1f} MiB<extra></extra>",
    )
    families = points["choice"].map(lambda choice: family_of(choice, reference))
    for family, (label, colour, symbol) in FAMILIES.items():
        chosen = points[families == family]
        if len(chosen):
            figure.add_scatter(
                x=chosen["step_time_ms_median"],
                y=chosen["peak_bytes"] * MIB,
                mode="markers",
                name=f"peak in a step, {label or reference}",
                marker={"color": colour, "symbol": symbol, "size": MARK_PX},
                customdata=chosen["choice"],
                hovertemplate="%{customdata}: %{x:.1f} ms, peak in a step %{y:.1f} MiB<extra></extra>",
            )
    x_range, y_range = [0.0, float(x.max()) * 1.12], [0.0, float(y.max()) * 1.12]
    names = points["choice"].tolist()
    pixels = [(px / x_range[1] * WIDTH_PX, py / y_range[1] * HEIGHT_PX) for px, py in zip(x, y, strict=True)]
    for name, (px, py), left, top in zip(names, place_labels(names, pixels), x, y, strict=True):
        figure.add_annotation(x=left, y=top, text=name, showarrow=False, xshift=px, yshift=py, yanchor="middle")
    figure.update_xaxes(title="median step time, ms", range=x_range)
    figure.update_yaxes(title="memory of the rank that has most, MiB", range=y_range)
    figure.update_layout(height=HEIGHT_PX + 100)
    return styled(figure)


def family_of(choice: str, reference: str) -> str:
    if choice == reference:
        return "reference"
    before = choice.partition("_")[0]
    return before if before in FAMILIES else "hand-written"


def place_labels(names: Sequence[str], points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The shift of each label's middle from its point, so that it covers no other label and no other point.

    A label stands to the right of its point, or to the left if the picture ends there, and moves up until it is free.

    Args:
        points: In pixels, from the lower left.
    """
    taken = [(x, y, MARK_PX / 2, MARK_PX / 2) for x, y in points]
    shifts = {}
    for place in sorted(range(len(points)), key=lambda place: points[place][1]):
        x, y = points[place]
        half = len(names[place]) * LETTER_PX / 2
        right = x + MARK_PX + 2 * half <= WIDTH_PX
        dx, dy = (half + MARK_PX) * (1 if right else -1), 0.0
        while any(cover((x + dx, y + dy, half, LINE_PX / 2), other) for other in taken):
            dy += LINE_PX / 2
        taken.append((x + dx, y + dy, half, LINE_PX / 2))
        shifts[place] = (dx, dy)
    return [shifts[place] for place in range(len(points))]


def cover(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Whether two boxes (middle x and y, half of width and height) overlap."""
    return abs(first[0] - second[0]) < first[2] + second[2] and abs(first[1] - second[1]) < first[3] + second[3]
