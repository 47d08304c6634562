"""A plan as one HTML file that needs no network: table, memory over time, lanes, sliders over other settings."""

import pandas as pd
from jinja2 import Environment, PackageLoader, select_autoescape
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from analysis.report.page import Section, drawing, render, table
from planner.columns import PLAN_COLUMNS
from planner.contracts import Simulated
from planner.figures import components_figure, lanes_figure, memory_figure
from planner.grid import AXES, Grid
from planner.plan import Case

LABELS = {
    "ranks": "ranks",
    "link": "rate of the links",
    "micro_batch_size": "samples in a micro-batch",
    "grad_accum_steps": "micro-batches a step (accumulation)",
    "bucket_cap_mb": "bucket size",
}
BANNER = (
    "Predicted: the strategies' own code ran on tensors without data, and operators and collectives took the time that "
    "a model of their costs gives them. Nothing was measured on these devices."
)


def plan_page(
    title: str,
    case: Case,
    frame: pd.DataFrame,
    simulated: dict[str, Simulated],
    recommended: str | None,
    sentences: list[str],
    lines: list[str],
    grid: Grid | None,
) -> str:
    """The page.

    Args:
        simulated: By choice, those that can be; in display order.
        recommended: The choice whose memory is drawn component by component.
        sentences: The recommendation.
        lines: What a reader must know of costs and intervals.
    """
    sections = [
        Section("What to take", " ".join(sentences)),
        Section("All choices", "Below 0 to spare: that much is missing.", table=table("plan", frame, PLAN_COLUMNS)),
    ]
    if simulated:
        shown = recommended or next(iter(simulated))
        sections += [
            Section(
                "Memory over one step",
                "What all tensors of one rank take, from the end of the step before to the end of this one.",
                figure=drawing(memory_figure(simulated, case.usable_bytes)),
            ),
            Section(
                f"What takes memory: {shown}",
                "The same by component.",
                figure=drawing(components_figure(simulated[shown], case.usable_bytes)),
            ),
            Section(
                "One step of each choice",
                "Exposed: the rank only waits for collectives. Gaps that nobody could see are closed.",
                figure=drawing(lanes_figure(simulated)),
            ),
        ]
    if grid is not None:
        sections.append(sliders_section(grid, case))
    return render(title, lines, sections, BANNER)


def sliders_section(grid: Grid, case: Case) -> Section:
    text = (
        f"{len(grid.cells)} of {grid.wanted} settings were simulated beforehand, in {grid.seconds:.0f} s: first those "
        "that differ from the one that was asked for in one respect, then in two, and so on. Dark blue: computing; "
        "orange: exposed communication."
    )
    choices = list(next(iter(grid.cells.values())))
    cells = {",".join(map(str, place)): [found[choice] for choice in choices] for place, found in grid.cells.items()}
    shown = [[said(axis, value, case) for value in grid.axes[axis]] for axis in AXES]
    data = {
        "cells": cells,
        "choices": choices,
        "usable": case.usable_bytes,
        "values": [list(grid.axes[axis]) for axis in AXES],
    }
    axes = [{"label": LABELS[axis], "shown": shown[index], "base": grid.base[index]} for index, axis in enumerate(AXES)]
    template = templates().get_template("sliders.html.j2")
    html = template.render(axes=axes, data=htmlsafe_json_dumps(data), shown=htmlsafe_json_dumps(shown))
    return Section("What if", text, figure=Markup(html))


def said(axis: str, value: float, case: Case) -> str:
    """A value of an axis as a slider shows it."""
    if axis == "link":
        links = [link for link in (case.cluster.inside, case.cluster.between) if link]
        rates = " and ".join(f"{link.bytes_per_s * value / 1e9:,.3g} GB/s" for link in links)
        return f"x {value:g} ({rates})"
    return f"{value:g} MiB" if axis == "bucket_cap_mb" else f"{value:g}"


def templates() -> Environment:
    return Environment(
        loader=PackageLoader("planner"), autoescape=select_autoescape(default=True, default_for_string=True)
    )
