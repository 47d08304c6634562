"""`ddp-lab plan`: all choices for a model on a cluster, and one of them recommended."""

import argparse
from dataclasses import replace
from itertools import accumulate, chain

import pandas as pd
from rich.console import Console
from rich.table import Table

from ddp_lab.analysis.files import write_csv
from ddp_lab.planner.beside import besides
from ddp_lab.planner.choices import choices
from ddp_lab.planner.coarse import that_may_fit, worth_simulating
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.sources import costs_of
from ddp_lab.planner.flags import AS_THE_RUNNERS, chosen_model
from ddp_lab.planner.meshes import on_all_meshes, required
from ddp_lab.planner.plan import Case, cores, simulating, told
from ddp_lab.planner.rates import Price, listed_price
from ddp_lab.planner.report.columns import PLAN_COLUMNS, SHOWN, WIDTH
from ddp_lab.planner.report.recommendation import gib, reasons, recommended
from ddp_lab.planner.report.table import Plan
from ddp_lab.planner.report.wording import certainty, headline, notes, runner_command
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import EXPERT, PIPELINE, TENSOR
from ddp_lab.runtime.settings.data import BatchSettings
from ddp_lab.strategy.options import AUTO

WITH_DIMENSION = {
    TENSOR: ("sequence_parallel",),
    PIPELINE: ("pipeline_schedule", "stages_per_rank", "pipeline_split"),
    EXPERT: ("router_scores", "router_bias"),
}
"""Settings that go with one dimension of a mesh alone."""
SETTINGS = ("micro_batch_size", "grad_accum_steps", "activation_checkpointing", "compile")
"""Columns of what the headline names, where it is the same in all rows."""
FULL = 4
"""A pipeline has up to so many micro-batches a stage by default, so that the bubble is a small part of the step."""


def run(options: argparse.Namespace, console: Console) -> None:
    """Simulate every choice, print the table and a recommendation.

    Raises:
        UserError: the command line makes no sense, or a file cannot be written.
    """
    plan = planned(options)
    console.print(headline(plan))
    frame = plan.frame if len(plan.cases) == 1 else plan.frame[plan.frame["fits"] != "unknown"]
    console.print("", printed(frame), "")
    found = besides(plan, options.jobs)
    for line in [*notes(plan), *reasons(plan.rows), *commands(plan), *found, *certainty(plan)]:
        console.print(line, soft_wrap=True, markup=False)
    if options.csv is not None:
        write_csv(options.csv, plan.frame)
        console.print(f"table: {options.csv}")


def commands(plan: Plan) -> list[str]:
    """The command line of a run of what is recommended, if anything is, and how to use the memory that it leaves."""
    best = recommended(plan.rows)
    if best is None:
        return []
    lines = [f"Run it: {runner_command(plan.case_of(best.get('mesh')), str(best['choice']))}"]
    if best["spare_bytes"] > best["peak_bytes"]:
        unused = f"{gib(best['spare_bytes'])} of a device's memory stay unused"
        lines.append(f"{unused}: `ddp-lab plan search` looks for the batch, recomputation and mesh that use them.")
    return lines


def planned(options: argparse.Namespace) -> Plan:
    """Every choice that the command line names, simulated.

    Raises:
        UserError: it makes no sense.
    """
    cases, left_out = cases_of(options)
    if any(case.config.cuts_tokens and case.config.has_stages for case in cases):
        raise UserError("--mesh with cp and pp: no plan knows what both cost together; plan each with dp and tp")
    wanted = options.choices.split(",") if options.choices else None
    choices(wanted, [case.mesh for case in cases])  # each goes with one of them
    tasks = [(case, name) for case in cases for name in choices(None, [case.mesh]) if not wanted or name in wanted]
    tasks, too_large = that_may_fit(tasks) if options.mesh == AUTO else (tasks, [])
    later = [task for task in tasks if task[0].config.has_stages] if options.mesh == AUTO else []
    first = [task for task in tasks if task not in later]
    with simulating(min(options.jobs or cores(), len(tasks))) as simulate:
        found = told(simulate, first, f"choices for {cases[0].model.name}")
        later, slower = worth_simulating(later, found, cases[0])
        found += told(simulate, later, "choices with a pipeline") if later else []
    return Plan(cases, found, [*left_out, *too_large, *slower])


def cases_of(options: argparse.Namespace) -> tuple[list[Case], list[str]]:
    """What the command line describes, on each mesh that fits; and a line for each mesh that does not.

    Raises:
        UserError: it makes no sense.
    """
    own = {dimension: {name: getattr(options, name) for name in names} for dimension, names in WITH_DIMENSION.items()}
    case = case_of(options)
    cases, left_out = on_all_meshes(case, own) if options.mesh == AUTO else ([required(case)], [])
    return cases if options.grad_accum_steps else [filled(each) for each in cases], left_out


def filled(case: Case) -> Case:
    """The case with enough micro-batches for its pipeline, if it has one."""
    stages, samples = case.mesh.degree(PIPELINE) if case.mesh else 1, case.micro_batch_size
    if stages == 1:
        return case
    steps = max(steps for steps in range(1, FULL * stages + 1) if samples % steps == 0)
    return replace(case, config=case.config.but(grad_accum_steps=steps))


def case_of(options: argparse.Namespace) -> Case:
    """What the command line describes, without a mesh where it asks for all.

    Raises:
        UserError: it makes no sense.
    """
    later = {"mesh", *chain(*WITH_DIMENSION.values())} if options.mesh == AUTO else set()
    given = {name: getattr(options, name) for name in {"mesh", *AS_THE_RUNNERS} - later}
    given["grad_accum_steps"] = steps = options.grad_accum_steps or 1
    cluster = hardware.cluster(options.gpus, options.link, options.between, options.efficiency)
    if options.global_batch_size is None:
        given["global_batch_size"] = BatchSettings(grad_accum_steps=steps).nearest_batch(cluster.world_size)
    config = RunConfig.of(**given)
    model = chosen_model(options)
    model.require_length(options.sequence_length)
    compiles = config.strategy.compile_backend is not None
    costs = costs_of(cluster, options.contention, compiles)
    price = listed_price(cluster.device.name) if options.price is None else Price(options.price)
    return Case(model, cluster, config, options.sequence_length, costs, price, options.tokens)


def printed(frame: pd.DataFrame) -> Table:
    """The table as the terminal shows it: of the columns `SHOWN`, in order of importance, those that `WIDTH` has room
    for. Settings that are the same in all rows are left out."""
    without = {name for name in SETTINGS if frame[name].nunique() <= 1}
    without |= {"samples_per_second"} if "tokens_per_second" in frame else set()
    cells = {
        name: [column.label, column.unit, *map(column.show, frame[name])]
        for name in SHOWN
        if name in frame and name not in without
        for column in (PLAN_COLUMNS[name],)
    }
    widths = accumulate(max(map(len, texts)) + 2 for texts in cells.values())
    shown = [name for name, width in zip(cells, widths, strict=True) if width <= WIDTH + 2]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (name for name in PLAN_COLUMNS if name in shown):
        label, unit, *_ = cells[name]
        is_text = name in ("choice", "mesh", "activation_checkpointing", "compile", "fits")
        table.add_column(f"{label}\n{unit}", justify="left" if is_text else "right", no_wrap=True)
    for texts in zip(*(cells[name][2:] for name in PLAN_COLUMNS if name in shown), strict=True):
        table.add_row(*texts)
    return table
