"""`scripts/plan.py`: all choices for a model on a cluster, and one of them recommended."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import track
from rich.table import Table

from analysis.columns import Column
from planner.costs import hardware
from planner.costs.sources import costs_of
from planner.flags import chosen_model
from planner.plan import Case, Plan, choices, outcomes
from planner.report.columns import PLAN_COLUMNS, SHOWN
from planner.report.page import plan_page
from planner.report.recommendation import reasons
from planner.report.wording import certainty, headline, notes
from training.config import RunConfig
from training.errors import UserError

AS_THE_RUNNERS = (
    "global_batch_size",
    "grad_accum_steps",
    "precision",
    "param_dtype",
    "reduce_dtype",
    "master_dtype",
    "activation_checkpointing",
    "offload",
    "clip_grad_norm",
    "bucket_cap_mb",
)
"""Flags that mean what they mean for the runner."""


def run(options: argparse.Namespace, console: Console) -> None:
    """Simulate every choice, print the table and a recommendation.

    Raises:
        UserError: the command line makes no sense, or a file cannot be written.
    """
    plan = planned(options)
    console.print(headline(plan.case))
    console.print("", printed(plan.frame, {name: PLAN_COLUMNS[name] for name in SHOWN}), "")
    for line in [*notes(plan.rows), *reasons(plan.rows), *certainty(plan)]:
        console.print(line)
    if options.csv is not None:
        write(options.csv, "--csv", plan.frame.to_csv(index=False))
        console.print(f"table: {options.csv}")
    if options.html is not None:
        write(options.html, "--html", plan_page(plan))
        console.print(f"open {options.html}")


def planned(options: argparse.Namespace) -> Plan:
    """Every choice that the command line names, simulated.

    Raises:
        UserError: it makes no sense.
    """
    case = case_of(options)
    names = choices(options.choices.split(",") if options.choices else None)
    found, console = outcomes([(case, name) for name in names], options.jobs), Console(stderr=True)
    hidden = not console.is_terminal
    return Plan(case, list(track(found, "simulating", len(names), console=console, transient=True, disable=hidden)))


def case_of(options: argparse.Namespace) -> Case:
    """What the command line describes.

    Raises:
        UserError: it makes no sense.
    """
    config = RunConfig(**{name: getattr(options, name) for name in AS_THE_RUNNERS})
    cluster = hardware.cluster(options.gpus, options.link, options.between, options.efficiency)
    config.micro_batch_size(cluster.world_size)
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
        is_text = name in ("choice", "fits", "setting", "note")
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
