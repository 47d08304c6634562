"""`ddp-lab plan`: all choices for a model on a cluster, and one of them recommended."""

import argparse
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from ddp_lab.analysis.columns import Column
from ddp_lab.planner.choices import choices
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.sources import costs_of
from ddp_lab.planner.flags import AS_THE_RUNNERS, chosen_model
from ddp_lab.planner.meshes import on_all_meshes, required
from ddp_lab.planner.plan import GIB, Case, Outcome, Plan, outcomes
from ddp_lab.planner.report.columns import PLAN_COLUMNS, SHOWN
from ddp_lab.planner.report.recommendation import reasons
from ddp_lab.planner.report.wording import certainty, headline, notes
from ddp_lab.progress import long_work
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import PIPELINE, TENSOR
from ddp_lab.strategy.options import AUTO

WITH_DIMENSION = {
    TENSOR: ("sequence_parallel", "async_tensor_parallel"),
    PIPELINE: ("pipeline_schedule", "stages_per_rank", "pipeline_split"),
}
"""Settings that go with one dimension of a mesh alone."""


def run(options: argparse.Namespace, console: Console) -> None:
    """Simulate every choice, print the table and a recommendation.

    Raises:
        UserError: the command line makes no sense, or a file cannot be written.
    """
    plan = planned(options)
    console.print(headline(plan))
    frame = plan.frame if len(plan.cases) == 1 else plan.frame[plan.frame["fits"] != "unknown"]
    console.print("", printed(frame, {name: PLAN_COLUMNS[name] for name in SHOWN}), "")
    for line in [*notes(plan), *reasons(plan.rows), *certainty(plan)]:
        console.print(line)
    if options.csv is not None:
        write(options.csv, "--csv", plan.frame.to_csv(index=False))
        console.print(f"table: {options.csv}")


def planned(options: argparse.Namespace) -> Plan:
    """Every choice that the command line names, simulated.

    Raises:
        UserError: it makes no sense.
    """
    cases, left_out = cases_of(options)
    wanted = options.choices.split(",") if options.choices else None
    choices(wanted, [case.mesh for case in cases])  # each goes with one of them
    tasks = [(case, name) for case in cases for name in choices(None, [case.mesh]) if not wanted or name in wanted]
    found: list[Outcome] = []
    with long_work(f"simulating {len(tasks)} choices for {cases[0].model.name}", len(tasks)) as tell:
        for outcome in outcomes(tasks, options.jobs):
            found.append(outcome)
            tell(gist(outcome))
    return Plan(cases, found, left_out)


def gist(outcome: Outcome) -> str:
    """What is known of a choice as soon as it is simulated."""
    if (simulated := outcome.simulated) is None:
        return f"{outcome.name}: {outcome.reason}"
    return f"{outcome.name}: {simulated.step_time_s * 1e3:.1f} ms, peak {simulated.memory.peak_bytes / GIB:.2f} GiB"


def cases_of(options: argparse.Namespace) -> tuple[list[Case], list[str]]:
    """What the command line describes, on each mesh that fits; and a line for each mesh that does not.

    Raises:
        UserError: it makes no sense.
    """
    case = case_of(options)
    if options.mesh != AUTO:
        return [required(case)], []
    own = {dimension: {name: getattr(options, name) for name in names} for dimension, names in WITH_DIMENSION.items()}
    return on_all_meshes(case, own)


def case_of(options: argparse.Namespace) -> Case:
    """What the command line describes, without a mesh where it asks for all.

    Raises:
        UserError: it makes no sense.
    """
    later = {"mesh", *chain(*WITH_DIMENSION.values())} if options.mesh == AUTO else set()
    config = RunConfig.of(**{name: getattr(options, name) for name in {"mesh", *AS_THE_RUNNERS} - later})
    cluster = hardware.cluster(options.gpus, options.link, options.between, options.efficiency)
    model = chosen_model(options)
    model.require_length(options.sequence_length)
    if options.record and options.efficiency is not None:
        raise UserError("--efficiency is for rates of a table; it does not go with --record")
    if options.record and options.param_dtype:
        raise UserError("--record: a record has the times of fp32 parameters; it does not go with --param-dtype")
    costs = costs_of(cluster, options.precision, options.record, options.contention)
    return Case(model, cluster, config, options.sequence_length, costs, options.price)


def printed(frame: pd.DataFrame, columns: Mapping[str, Column]) -> Table:
    """The table as the terminal shows it, with those of `columns` that it has."""
    table = Table(box=None, pad_edge=False)
    shown = [name for name in columns if name in frame]
    for name in shown:
        column = columns[name]
        is_text = name in ("choice", "mesh", "fits", "note")
        table.add_column(f"{column.label}\n{column.unit}", justify="left" if is_text else "right", no_wrap=True)
    for values in frame.to_dict("records"):
        table.add_row(*(columns[name].show(values[name]) for name in shown))
    return table


def write(path: Path, flag: str, text: str) -> None:
    """Write a file.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written: {error.strerror}") from None
