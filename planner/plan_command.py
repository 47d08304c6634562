"""`scripts/plan.py`: all choices for a model on a cluster, and one of them recommended."""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from planner.columns import PLAN_COLUMNS, SHOWN
from planner.flags import chosen_model, require_between
from planner.grid import Grid, figures, fill
from planner.page import plan_page
from planner.plan import Case, Knowledge, Outcome, Plan, choices, distinct
from planner.recommendation import contenders, reasons
from planner.recorded import device_of, load
from planner.sources import costs_of
from planner.timeline import write_trace
from planner.wording import certainty, headline, remarks
from planner.workers import simulations, whole
from training.cli import unknown_name
from training.config import PRECISIONS, RunConfig
from training.errors import UserError

LONGEST = 1_000_000


def run(options: argparse.Namespace, console: Console) -> None:
    """Simulate every choice, print the table and a recommendation.

    Raises:
        UserError: the command line makes no sense, or a file cannot be written.
    """
    plan = planned(options)
    console.print(headline(plan.case))
    console.print("", printed(plan.frame), "")
    for line in [*remarks(plan.rows), *reasons(plan.rows), *certainty(plan)]:
        console.print(line)
    if options.csv is not None:
        write(options.csv, "--csv", plan.frame.to_csv(index=False))
        console.print(f"table: {options.csv}")
    if options.traces is not None:
        write_traces(plan, options.traces)
        console.print(f"traces: {options.traces}/<choice>")
    if options.html is not None:
        grid = filled(plan, options.grid_seconds, options.jobs) if options.grid_seconds else None
        write(options.html, "--html", plan_page(plan, grid))
        console.print(f"open {options.html}")


def planned(options: argparse.Namespace) -> Plan:
    """Every choice that the command line asks for, simulated.

    Raises:
        UserError: it makes no sense.
    """
    case = case_of(options)
    costs = costs_of(case)
    names = choices(options.choices.split(",") if options.choices else None)
    same_as = distinct(names)
    simulated = list(dict.fromkeys(same_as.values()))
    answers = simulations([(case, name) for name in simulated], options.jobs, whole)
    by_name = dict(zip(simulated, followed(answers, len(simulated)), strict=True))
    return Plan(case, costs, [replace(by_name[same_as[name]], choice=name) for name in names])


def filled(plan: Plan, seconds: float, jobs: int | None) -> Grid | None:
    """Other settings around the one that was planned, for choices that differ and can be simulated; None: there are no
    such choices."""
    outcomes = {outcome.choice: outcome for outcome in plan.outcomes if outcome.simulated}
    if not outcomes:
        return None
    same_as = distinct(list(outcomes))
    planned = {same_as[name]: outcome for name, outcome in outcomes.items()}
    console = Console(stderr=True)
    if console.is_terminal:
        console.print(f"simulating other settings for the sliders, up to {seconds:g} s (--grid-seconds)")
    return fill(
        plan.case,
        {name: figures(outcome) for name, outcome in planned.items()},
        lambda tasks: simulations(tasks, jobs, figures),
        seconds,
        first={same_as[name] for name in contenders(plan.rows)},
        without_buckets={
            name for name, outcome in planned.items() if outcome.simulated and not outcome.simulated.reads_bucket_cap
        },
    )


def write_traces(plan: Plan, folder: Path) -> None:
    """One trace a choice, where `scripts/analyze_traces_*.py --trace-dir <folder>/<choice>` finds it.

    Raises:
        UserError: one cannot be written.
    """
    for outcome in plan.outcomes:
        if outcome.simulated:
            path = folder / outcome.choice / "rank_0" / "predicted.step0.pt.trace.json.gz"
            write_trace(outcome.simulated, path, outcome.choice, plan.case.cluster)


def case_of(options: argparse.Namespace) -> Case:
    """What the command line asks for.

    Raises:
        UserError: it makes no sense.
    """
    from planner import hardware

    require_between(options, "price", 0, 1e9)
    require_between(options, "jobs", 1, 1024)
    require_between(options, "straggler", 1, 1000)
    require_between(options, "grid_seconds", 0, 86_400)
    require_between(options, "sequence_length", 1, LONGEST)
    require_between(options, "longest_sequence_length", options.sequence_length, LONGEST)
    if options.precision not in PRECISIONS:
        raise UserError(f"--precision: {unknown_name('precision', options.precision, PRECISIONS)}")
    names = ("global_batch_size", "grad_accum_steps", "precision", "clip_grad_norm", "bucket_cap_mb")
    config = RunConfig(**{name: getattr(options, name) for name in names})
    of_record = device_of(load(options.record)) if options.record else None
    cluster = hardware.cluster(options.gpus, options.link, options.between, of_record)
    config.micro_batch_size(cluster.world_size)
    model = chosen_model(options)
    longest = options.longest_sequence_length or options.sequence_length
    model.require_length(longest)
    if options.longest_sequence_length and model.kind != "tokens":
        raise UserError(f"--longest-sequence-length: {model.name} takes images, which are all of one size")
    files = (options.record, options.collectives, options.contention)
    knowledge = Knowledge(*files, options.rescale, options.efficiency, options.straggler)
    return Case(model, cluster, config, options.sequence_length, longest, options.price, knowledge)


def followed(found: Iterable[Outcome], count: int) -> Iterator[Outcome]:
    """What comes, with a bar on standard error where that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=count)
        for of_choice in found:
            progress.update(task, advance=1)
            yield of_choice


def printed(frame: pd.DataFrame) -> Table:
    """The table as the terminal shows it."""
    table = Table(box=None, pad_edge=False)
    shown = [name for name in SHOWN if name in frame]
    for name in shown:
        column = PLAN_COLUMNS[name]
        is_text = name in ("choice", "fits")
        table.add_column(f"{column.label}\n{column.unit}", justify="left" if is_text else "right", no_wrap=True)
    for values in frame.to_dict("records"):
        table.add_row(*(PLAN_COLUMNS[name].show(values[name]) for name in shown))
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
