"""What a page shows of a run of many ranks: three of them in full, the spread over all, and a heat map by step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.columns import Column
from analysis.report.figures import styled
from analysis.report.page import BLANK, Section, drawing

MOST_RANKS = 16
"""Ranks that a page shows in full."""
SPREAD: dict[str, Callable[[list[float]], float]] = {"least": min, "median": median, "most": max}


def representatives(steps: pd.DataFrame, most: int = MOST_RANKS) -> dict[int, str]:
    """Ranks to show in full, and what each stands for: all, or the slowest, the median and the fastest.

    Ranks wait for each other, so their steps take equally long; they are ordered by the mean of what is their own:
    the step without exposed waiting.

    Args:
        steps: Columns rank, step_ms, exposed_wait_ms: a row a rank and step.
    """
    own = (
        (steps["step_ms"] - steps["exposed_wait_ms"].fillna(0)).groupby(steps["rank"]).mean().sort_values(kind="stable")
    )
    ranks = own.index.tolist()
    if len(ranks) <= most:
        return dict.fromkeys(sorted(ranks), "")
    chosen = {ranks[-1]: "slowest", ranks[len(ranks) // 2]: "median", ranks[0]: "fastest"}
    return dict(sorted(chosen.items()))


def abridged(section: Section, ranks: Sequence[int]) -> Section:
    """The section, with a table of more than `MOST_RANKS` ranks cut to `ranks` and the spread over all."""
    table = section.table
    place = (
        next((i for i, (column, _) in enumerate(table["columns"]) if column.label == "rank"), None) if table else None
    )
    if table is None or place is None or len({row[place]["value"] for row in table["rows"]}) <= MOST_RANKS:
        return section
    rows = [row for row in table["rows"] if row[place]["value"] in ranks]
    note = (
        "The last rows are the least, median and most over all ranks; the CSV files beside this page have every rank."
    )
    return replace(section, table={**table, "rows": rows, "foot": spread_rows(table, place), "note": note})


def spread_rows(table: dict[str, Any], place: int) -> list[list[dict[str, Any]]]:
    """Rows of least, median and most over all ranks, of each kind of row: those alike in the first column of text."""
    kind = next((i for i, (_, is_text) in enumerate(table["columns"]) if is_text), None)
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    for row in table["rows"]:
        groups.setdefault("" if kind is None else row[kind]["value"], []).append(row)
    foot = []
    for label, rows in groups.items():
        for name, summarize in SPREAD.items():
            cells = []
            for index, (column, is_text) in enumerate(table["columns"]):
                values = [row[index]["value"] for row in rows if row[index]["value"] != ""]
                if index in (place, kind):
                    text = name if index == place else label
                    cells.append({"name": "", "value": text, "shown": text})
                elif is_text or not values:
                    cells.append(BLANK)
                else:
                    cells.append(spread_cell(summarize(values), column))
            foot.append(cells)
    return foot


def spread_cell(value: float, column: Column) -> dict[str, Any]:
    shown = f"{value:g}" if column.unit == "" else column.show(value)
    return {"name": "", "value": value, "shown": shown}


def ranks_section(steps: pd.DataFrame, ranks: dict[int, str]) -> Section:
    """Every rank and step, and which ranks the rest of the page shows."""
    named = ", ".join(f"rank {rank} ({role})" for rank, role in ranks.items())
    text = (
        f"A row a rank, a column a step. Of these {steps['rank'].nunique()} ranks the page shows in full {named}, by "
        "step time without exposed waiting."
    )
    return Section("All ranks", text, figure=drawing(ranks_figure(steps)))


def ranks_figure(steps: pd.DataFrame) -> go.Figure:
    """Two heat maps, rank by step: how long the step took, and how much of it was exposed waiting."""
    panels = {"step_ms": "step time", "exposed_wait_ms": "exposed waiting"}
    figure = make_subplots(cols=2, shared_yaxes=True, horizontal_spacing=0.14, subplot_titles=list(panels.values()))
    for index, (column, name) in enumerate(panels.items(), start=1):
        by_step = steps.pivot_table(index="rank", columns="step", values=column)
        figure.add_heatmap(
            z=by_step.round(3).to_numpy().tolist(),
            x=[f"{step}" for step in by_step.columns],
            y=by_step.index.tolist(),
            name=name,
            zmin=0 if column == "exposed_wait_ms" else None,
            colorscale="Cividis",
            colorbar={"title": "ms", "thickness": 12, "x": 0.44 if index == 1 else 1.01, "xanchor": "left"},
            hovertemplate=f"rank %{{y}}, step %{{x}}: {name} %{{z:.1f}} ms<extra></extra>",
            row=1,
            col=index,
        )
    figure.update_layout(height=min(900, 160 + 8 * steps["rank"].nunique()), meta={"narrowest": 560})
    figure.update_xaxes(title="step", type="category", showgrid=False)
    figure.update_yaxes(title="rank", autorange="reversed", col=1)
    figure.update_annotations(font={"size": 13})
    styled(figure)
    return figure.update_layout(margin={"t": 40})
