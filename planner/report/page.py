"""A plan as one HTML file that needs no network: table, memory over time, steps, sliders over other settings."""

from jinja2 import Environment, PackageLoader, select_autoescape
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from analysis.report.page import Section, drawing, render, table
from planner.plan import Case, Plan
from planner.report.columns import PLAN_COLUMNS
from planner.report.figures import lanes_figure, memory_figure
from planner.report.recommendation import reasons, recommended
from planner.report.sliders import AXES, Grid
from planner.report.wording import certainty, headline, notes

LABELS = {
    "ranks": "ranks",
    "link": "rate of the links",
    "micro_batch_size": "samples in a micro-batch",
    "grad_accum_steps": "micro-batches a step (accumulation)",
}
BANNER = (
    "Predicted: the strategies' own code ran on tensors without data, and a model of costs said how long operators and "
    "collectives take. Nothing was measured on these devices."
)


def plan_page(plan: Plan, grid: Grid | None) -> str:
    """The page.

    Args:
        grid: What the sliders show; None: no sliders.
    """
    case = plan.case
    simulated = {outcome.choice: outcome.simulated for outcome in plan.outcomes if outcome.simulated}
    best = recommended(plan.rows)
    sections = [
        Section("What to take", " ".join(reasons(plan.rows))),
        Section(
            "All choices",
            "Where memory to spare is below 0, that much is missing.",
            table=table("plan", plan.frame, PLAN_COLUMNS),
        ),
    ]
    if simulated:
        shown = best["choice"] if best else next(iter(simulated))
        sections += [
            Section(
                f"Memory over one step: {shown}",
                "All tensors of one rank, from the end of the step before to the end of this one.",
                figure=drawing(memory_figure(simulated[shown], case.usable_bytes)),
            ),
            Section(
                "One step of each choice",
                "Exposed: the rank only waits for collectives. Very small gaps are closed.",
                figure=drawing(lanes_figure(simulated)),
            ),
        ]
    if grid is not None:
        sections.append(sliders_section(grid, case))
    lines = [*headline(case).splitlines(), *notes(plan.rows), *certainty(plan)]
    return render(
        f"Plan: {case.model.name} on {case.cluster.world_size} x {case.cluster.device.name}", lines, sections, BANNER
    )


def sliders_section(grid: Grid, case: Case) -> Section:
    text = (
        f"The recommended choice, the fastest, and the one with the smallest peak, in {len(grid.cells)} of "
        f"{grid.wanted} settings, which were simulated in advance: first those that differ from the planned one in one "
        "respect, then in two, and so on. Dark blue: computing; orange: exposed communication."
    )
    shown = [[said(axis, value, case) for value in grid.axes[axis]] for axis in AXES]
    data = {
        "cells": {",".join(map(str, place)): found for place, found in grid.cells.items()},
        "choices": grid.choices,
        "usable": case.usable_bytes,
        "values": [list(grid.axes[axis]) for axis in AXES],
        "shown": shown,
    }
    axes = [{"label": LABELS[axis], "shown": shown[index], "base": grid.base[index]} for index, axis in enumerate(AXES)]
    html = templates().get_template("sliders.html.j2").render(axes=axes, data=htmlsafe_json_dumps(data))
    return Section("What if", text, figure=Markup(html))


def said(axis: str, value: float, case: Case) -> str:
    """The value of an axis as its slider shows it."""
    if axis == "link":
        links = [link for link in (case.cluster.inside, case.cluster.between) if link]
        rates = " and ".join(f"{link.bytes_per_s * value / 1e9:,.3g} GB/s" for link in links)
        return f"x {value:g} ({rates})"
    return f"{value:g}"


def templates() -> Environment:
    return Environment(
        loader=PackageLoader("planner.report"), autoescape=select_autoescape(default=True, default_for_string=True)
    )
