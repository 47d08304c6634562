"""A plan as an HTML file that needs no network: table, memory over time, steps."""

from pathlib import Path

import pandas as pd

from ddp_lab.analysis.errors import TraceError
from ddp_lab.analysis.report.page import Section, drawing, render, table, write_page
from ddp_lab.planner.plan import Plan
from ddp_lab.planner.report.columns import PLAN_COLUMNS, SAVINGS_COLUMNS
from ddp_lab.planner.report.figures import lanes_figure, memory_figure, savings_figure
from ddp_lab.planner.report.recommendation import reasons, recommended
from ddp_lab.planner.report.wording import certainty, headline, notes
from ddp_lab.runtime.errors import UserError

BANNER = (
    "Predicted: the strategies' own code ran on tensors without data, and a model of costs said how long operators and "
    "collectives take. Nothing was measured on these devices."
)

SAVINGS_BANNER = (
    "Predicted, except for what is called measured: the strategies' own code ran on tensors without data, and every "
    "tensor was counted."
)


def write_html(path: Path, page: str) -> None:
    """Write the page of `--html`, and Plotly's script beside it.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_page(path, page)
    except TraceError as error:
        raise UserError(f"--html: {error}") from None


def savings_page(about: str, frame: pd.DataFrame) -> str:
    """What settings of a run would save, with a bar of components at the peak for each."""
    text = "Other settings of the same run, one at a time, and in the last row several at once."
    sections = [
        Section("At the peak", text, figure=drawing(savings_figure(frame))),
        Section("What each would save", table=table("savings", frame, SAVINGS_COLUMNS)),
    ]
    return render("What would save memory", [about], sections, SAVINGS_BANNER)


def plan_page(plan: Plan) -> str:
    """The page."""
    case = plan.case
    simulated = {outcome.name: outcome.simulated for outcome in plan.outcomes if outcome.simulated}
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
        shown = best["name"] if best else next(iter(simulated))
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
    lines = [*headline(plan).splitlines(), *notes(plan), *certainty(plan)]
    return render(
        f"Plan: {case.model.name} on {case.cluster.world_size} x {case.cluster.device.name}", lines, sections, BANNER
    )
