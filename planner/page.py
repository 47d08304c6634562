"""A plan as one HTML file that needs no network: table, memory over time, lanes, sliders over other settings."""

from jinja2 import Environment, PackageLoader, select_autoescape
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from analysis.report.page import Section, drawing, render, table
from planner.columns import PLAN_COLUMNS
from planner.figures import components_figure, lanes_figure, memory_figure
from planner.grid import AXES, OWN, Grid
from planner.plan import Case, Plan
from planner.recommendation import reasons, recommended
from planner.wording import certainty, headline, remarks

LABELS = {
    "ranks": "ranks",
    "link": "rate of the links",
    "micro_batch_size": "samples in a micro-batch",
    "grad_accum_steps": "micro-batches a step (accumulation)",
    "bucket_cap_mb": "bucket size",
}
NOT_SIMULATED = False
"""In place of a choice's figures, where None says that it cannot be simulated."""
BANNER = (
    "Predicted: the strategies' own code ran on tensors without data, and operators and collectives took the time that "
    "a model of their costs gives them. Nothing was measured on these devices."
)


def plan_page(plan: Plan, grid: Grid | None) -> str:
    """The page.

    Args:
        grid: What sliders show; None: no sliders.
    """
    case = plan.case
    simulated = {outcome.choice: outcome.simulated for outcome in plan.outcomes if outcome.simulated}
    best = recommended(plan.rows)
    sections = [
        Section("What to take", " ".join(reasons(plan.rows))),
        Section(
            "All choices", "Below 0 to spare: that much is missing.", table=table("plan", plan.frame, PLAN_COLUMNS)
        ),
    ]
    if simulated:
        shown = best["choice"] if best else next(iter(simulated))
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
    lines = [*headline(case).splitlines(), *remarks(plan.rows), *certainty(plan)]
    return render(
        f"Plan: {case.model.name} on {case.cluster.world_size} x {case.cluster.device.name}", lines, sections, BANNER
    )


def sliders_section(grid: Grid, case: Case) -> Section:
    whole = sum(len(found) == len(grid.choices) for found in grid.cells.values())
    text = (
        f"From {grid.simulated} simulations, made beforehand in {grid.seconds:.0f} s: figures for {len(grid.cells)} of "
        f"{grid.wanted} settings, for {whole} of them with every choice; first those that differ from the one that was "
        "asked for in one respect, then in two, and so on. Dark blue: computing; orange: exposed communication."
    )
    cells = {
        ",".join(map(str, place)): [found.get(choice, NOT_SIMULATED) for choice in grid.choices]
        for place, found in grid.cells.items()
    }
    shown = [[said(axis, value, case) for value in grid.axes[axis]] for axis in AXES]
    data = {
        "cells": cells,
        "choices": grid.choices,
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
    if axis == "bucket_cap_mb":
        return "each choice's own" if value == OWN else f"{value:g} MiB"
    return f"{value:g}"


def templates() -> Environment:
    return Environment(
        loader=PackageLoader("planner"), autoescape=select_autoescape(default=True, default_for_string=True)
    )
