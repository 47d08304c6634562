"""`scripts/plan.py`: all choices for a model on a cluster, and one of them recommended."""

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from planner.columns import PLAN_COLUMNS, SHOWN
from planner.flags import add_model_flags, chosen_model, require_between
from planner.plan import Case, Costs, Outcome, choices, row
from planner.recommendation import reasons
from planner.sources import costs_of
from planner.workers import simulations
from training.cli import unknown_name
from training.config import PRECISIONS, RunConfig, bucket_cap
from training.errors import UserError

LONGEST = 1_000_000
DEFAULT_LENGTH = 512
"""At which the runner cuts reviews (`training.text`)."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument(
        "--gpus", required=True, help="devices: 2xL4, or 4x8xH100 for 4 nodes of 8; 2xcpu is this machine"
    )
    parser.add_argument("--link", required=True, help="between devices of a node: nvlink4, pcie4, 10gbit, ...")
    parser.add_argument("--between", help="between nodes, shared by the devices of one: ndr, 8xndr, 100gbit, ...")
    parser.add_argument("--sequence-length", type=int, default=DEFAULT_LENGTH, help="tokens of a sample (default: 512)")
    parser.add_argument("--global-batch-size", type=int, default=8, help="samples in an optimizer step (default: 8)")
    parser.add_argument(
        "--grad-accum-steps", type=int, default=2, help="micro-batches of a rank in an optimizer step (default: 2)"
    )
    parser.add_argument(
        "--precision", default="fp32", help="fp32, or bf16 for autocast over fp32 states (default: fp32)"
    )
    parser.add_argument("--clip-grad-norm", type=float, help="clip gradients to this norm, as the runner would")
    parser.add_argument("--bucket-cap-mb", type=bucket_cap, help="largest gradient bucket in MiB (default: 25)")
    parser.add_argument("--price", type=float, help="of one device for an hour, in any currency")
    parser.add_argument("--choices", metavar="NAMES", help="only these strategies, with commas between (default: all)")
    parser.add_argument(
        "--jobs", type=int, help="simulations at a time, in processes of their own (default: a core each)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")


def run(options: argparse.Namespace, console: Console) -> None:
    """Simulate every choice, print the table and a recommendation.

    Raises:
        UserError: the command line makes no sense, or a file cannot be written.
    """
    case = case_of(options)
    costs = costs_of(case)
    names = choices(options.choices.split(",") if options.choices else None)
    jobs = options.jobs or os.cpu_count() or 1
    found = list(followed(simulations([(case, name) for name in names], jobs), names))
    rows = [row(of_choice, case, costs) for of_choice in found]
    frame = frame_of(rows)
    console.print(headline(case))
    console.print("", printed(frame), "")
    for line in [*remarks(rows), *reasons(rows), *certainty(costs)]:
        console.print(line)
    if options.csv is not None:
        write_csv(options.csv, frame)


def case_of(options: argparse.Namespace) -> Case:
    """What the command line asks for.

    Raises:
        UserError: it makes no sense.
    """
    from planner import hardware

    require_between(options, "price", 0, 1e9)
    require_between(options, "jobs", 1, 1024)
    require_between(options, "sequence_length", 1, LONGEST)
    if options.precision not in PRECISIONS:
        raise UserError(f"--precision: {unknown_name('precision', options.precision, PRECISIONS)}")
    names = ("global_batch_size", "grad_accum_steps", "precision", "clip_grad_norm", "bucket_cap_mb")
    config = RunConfig(**{name: getattr(options, name) for name in names})
    cluster = hardware.cluster(options.gpus, options.link, options.between)
    config.micro_batch_size(cluster.world_size)
    model = chosen_model(options)
    model.require_length(options.sequence_length)
    return Case(model, cluster, config, options.sequence_length, options.price)


def followed(found: Iterable[Outcome], names: Sequence[str]) -> Iterator[Outcome]:
    """What comes, with a bar on standard error where that is a terminal."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(names))
        for of_choice in found:
            progress.update(task, advance=1)
            yield of_choice


def frame_of(rows: list[dict[str, object]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    return frame[[name for name in PLAN_COLUMNS if name in frame]]


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


def headline(case: Case) -> str:
    cluster, config = case.cluster, case.config
    nodes = f"{cluster.nodes} nodes of {cluster.ranks_per_node}" if cluster.nodes > 1 else f"{cluster.ranks_per_node}"
    between = f", {cluster.between.name} between nodes" if cluster.between and cluster.nodes > 1 else ""
    samples = f"{case.sequence_length} tokens" if case.model.kind == "tokens" else "224 x 224 pixels"
    return (
        f"PREDICTED, not measured: {case.model.name} ({case.model.elements() / 1e6:,.1f} M parameters) "
        f"on {nodes} x {cluster.device.name}, {cluster.inside.name}{between}.\nA global batch of "
        f"{config.global_batch_size} samples of {samples}: {config.grad_accum_steps} micro-batches of "
        f"{case.micro_batch_size} on each rank; {config.precision}."
    )


def remarks(rows: list[dict[str, object]]) -> list[str]:
    """What the table could not say, each thing once."""
    by_remark: dict[str, list[str]] = {}
    for of_choice in rows:
        if of_choice["remark"]:
            by_remark.setdefault(str(of_choice["remark"]), []).append(str(of_choice["choice"]))
    return [f"{', '.join(names)}: {remark}" for remark, names in by_remark.items()]


def certainty(costs: Costs) -> list[str]:
    return [
        f"Intervals: operators off by {costs.compute_error:.0%} at most and collectives by {costs.link_error:.0%}. "
        "To spare: of a device's memory, less 1 GiB for CUDA itself.",
        *costs.sources,
    ]


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Write the table.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.write_text(frame.to_csv(index=False))
    except OSError as error:
        raise UserError(f"--csv {path}: cannot be written: {error.strerror}") from None
