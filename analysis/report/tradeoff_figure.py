"""Memory against step time: what a user chooses by. Labels find a place where they cover nothing."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from analysis.columns import MIB
from analysis.report.figures import styled

WIDTH_PX, HEIGHT_PX = 1000, 520
LETTER_PX, LINE_PX = 7.6, 18
FAMILIES = {
    "hand-written": ("hand-written", "#0072B2", "circle"),
    "pytorch": ("PyTorch", "#D55E00", "square"),
    "deepspeed": ("DeepSpeed", "#009E73", "diamond"),
    "reference": ("", "var(--ink)", "star"),
}
"""Label, colour and symbol, by what stands before a choice's first underscore; all others are hand-written."""

Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels."""


def tradeoff_figure(table: pd.DataFrame, reference: str) -> go.Figure:
    """A point a choice: median step time across, peak memory up, and below it what it holds at rest."""
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
        marker={"symbol": "line-ew", "size": 13, "line": {"width": 2.5, "color": "#777777"}},
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
                name=f"peak in a step, {reference if family == 'reference' else label}",
                marker={"color": colour, "symbol": symbol, "size": 13 if family != "reference" else 16},
                customdata=chosen["choice"],
                hovertemplate="%{customdata}: %{x:.1f} ms, peak in a step %{y:.1f} MiB<extra></extra>",
            )
    x_range, y_range = [0.0, float(x.max()) * 1.12], [0.0, float(y.max()) * 1.12]
    pixels = [(px / x_range[1] * WIDTH_PX, py / y_range[1] * HEIGHT_PX) for px, py in zip(x, y, strict=True)]
    lows = [py / y_range[1] * HEIGHT_PX for py in rest]
    taken = [(px - 8, low - 5, px + 8, py + 8) for (px, py), low in zip(pixels, lows, strict=True)]
    names = points["choice"].tolist()
    for name, (px, py), left, top in zip(names, place_labels(names, pixels, taken), x, y, strict=True):
        figure.add_annotation(
            x=left, y=top, text=name, showarrow=False, xshift=px, yshift=py, xanchor="center", yanchor="middle"
        )
    figure.update_xaxes(title="median step time, ms", range=x_range)
    figure.update_yaxes(title="memory of the rank that has most, MiB", range=y_range)
    figure.update_layout(height=HEIGHT_PX + 100)
    return styled(figure)


def family_of(choice: str, reference: str) -> str:
    if choice == reference:
        return "reference"
    before = choice.partition("_")[0]
    return before if before in FAMILIES else "hand-written"


def place_labels(
    names: Sequence[str], points: Sequence[tuple[float, float]], taken: Sequence[Box]
) -> list[tuple[float, float]]:
    """Where the middle of each label goes, as a shift from its point, so that it covers as little as can be.

    Args:
        points: In pixels, from the lower left.
        taken: What must not be covered.
    """
    boxes = list(taken)
    shifts = []
    for name, (x, y) in zip(names, points, strict=True):
        half = len(name) * LETTER_PX / 2
        candidates = [
            (dx, dy)
            for far in (1.0, 1.8, 2.8)
            for dx, dy in (
                (half + 13, 0.0),
                (-half - 13, 0.0),
                (0.0, LINE_PX * far),
                (half + 8, LINE_PX * 0.7 * far),
                (-half - 8, LINE_PX * 0.7 * far),
                (half + 8, -LINE_PX * 0.7 * far),
                (-half - 8, -LINE_PX * 0.7 * far),
            )
        ]

        def box(shift: tuple[float, float], x: float = x, y: float = y, half: float = half) -> Box:
            left, bottom = x + shift[0] - half, y + shift[1] - LINE_PX / 2
            return left, bottom, left + 2 * half, bottom + LINE_PX

        def cost(shift: tuple[float, float]) -> float:
            mine = box(shift)
            outside = max(0.0, -mine[0]) + max(0.0, mine[2] - WIDTH_PX) + max(0.0, mine[3] - HEIGHT_PX)
            return sum(common_area(mine, other) for other in boxes) + 1000 * outside

        best = min(candidates, key=cost)
        boxes.append(box(best))
        shifts.append(best)
    return shifts


def common_area(first: Box, second: Box) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return max(width, 0.0) * max(height, 0.0)
