"""`scripts/plan.py choosing`: the decision guide, docs/choosing.md, from plans of the usual cases."""

import argparse
import datetime
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from rich.console import Console

from planner import plan_command
from planner.columns import PLAN_COLUMNS
from planner.flags import add_plan_flags
from planner.plan import Plan
from planner.recommendation import reasons
from planner.wording import certainty, remarks
from training.cli import OneLineParser, unknown_name
from training.errors import UserError

CHOICES = "bucket_ddp_async,pytorch_ddp,zero1,zero2,zero3,pytorch_zero3"
"""One of each kind: with buckets of its own, PyTorch's, each stage of ZeRO, FSDP2."""
COLUMNS = (
    "choice",
    "fits",
    "spare_bytes",
    "peak_bytes",
    "step_time_ms",
    "step_time_low_ms",
    "step_time_high_ms",
    "samples_per_second",
    "exposed_ms",
)


@dataclass(frozen=True)
class Usual:
    """A usual case.

    Attributes:
        flags: Of `scripts/plan.py`.
    """

    heading: str
    flags: str

    @property
    def command(self) -> str:
        return f"python scripts/plan.py {self.flags} --choices {CHOICES}"


CASES = {
    "fine-tuning": Usual(
        "Fine-tuning 360 M parameters on 2 small GPUs",
        "--model SmolLM2-360M --gpus 2xL4 --link pcie4 --global-batch-size 8 --grad-accum-steps 1",
    ),
    "resnet": Usual(
        "A network of ResNet-50's size on 8 GPUs",
        "--model resnet-50 --gpus 8xA100-40GB --link nvlink3 --global-batch-size 512 --grad-accum-steps 1",
    ),
    "1.5b": Usual(
        "1.5 B parameters on 4 GPUs of 24 GB",
        "--model Qwen2.5-1.5B --gpus 4xL4 --link pcie4 --global-batch-size 4 --grad-accum-steps 1",
    ),
    "7b": Usual(
        "7 B parameters on 8 GPUs of 80 GB",
        "--model Qwen2.5-7B --gpus 8xH100 --link nvlink4 --global-batch-size 8 --grad-accum-steps 1 --precision bf16",
    ),
    "70b": Usual(
        "70 B parameters on 64 GPUs of 80 GB",
        "--model Llama-3.1-70B --gpus 8x8xH100 --link nvlink4 --between 8xndr --global-batch-size 64 "
        "--grad-accum-steps 1",
    ),
}


def run(options: argparse.Namespace, console: Console) -> None:
    """Plan each case, and write the guide.

    Raises:
        UserError: an unknown case, or the file cannot be written.
    """
    names = options.cases.split(",") if options.cases else list(CASES)
    for name in names:
        if name not in CASES:
            raise UserError(f"--cases: {unknown_name('case', name, CASES)}")
    sections = []
    for name in names:
        console.print(f"{CASES[name].heading} ...")
        sections.append(section(CASES[name], planned(CASES[name], options.jobs)))
    plan_command.write(options.output, "--output", guide(sections, names, datetime.datetime.now(datetime.UTC).date()))
    console.print(f"guide: {options.output}")


def planned(usual: Usual, jobs: int | None = None) -> Plan:
    parser = OneLineParser()
    add_plan_flags(parser)
    flags = [*shlex.split(usual.flags), "--choices", CHOICES]
    return plan_command.planned(parser.parse_args([*flags, "--jobs", str(jobs)] if jobs else flags))


def guide(sections: Sequence[str], names: Sequence[str], date: datetime.date) -> str:
    """The whole document.

    Args:
        names: Of the cases, of which `sections` speak.
    """
    cases = "" if list(names) == list(CASES) else f" --cases {','.join(names)}"
    head = f"""# Choosing a strategy

Written on {date}, not by hand, by

    python scripts/plan.py choosing --output docs/choosing.md{cases}

Every figure is **predicted** by running the strategies' own code on tensors without data ([planner.md](planner.md)).
None was measured on these devices: the order of choices, and what fits, are surer than milliseconds. For your own model
and machine, change the command of the nearest case.
"""
    return "\n".join([head, *sections])


def section(usual: Usual, plan: Plan) -> str:
    """One case: the command, what to take and why, and the table."""
    sentences = [*reasons(plan.rows), *remarks(plan.rows)]
    parts = [
        f"## {usual.heading}\n",
        f"    {usual.command}\n",
        "\n".join(f"- {sentence}" for sentence in sentences) + "\n",
        markdown(plan.frame),
        "\n".join(f"- {sentence}" for sentence in certainty(plan)) + "\n",
    ]
    return "\n".join(parts)


def markdown(frame: pd.DataFrame) -> str:
    """The table in Markdown."""
    shown = [name for name in COLUMNS if name in frame]
    headings = [
        f"{column.label}, {column.unit}" if column.unit else column.label
        for column in map(PLAN_COLUMNS.get, shown)
        if column
    ]
    lines = [headings, ["---"] * len(shown)]
    lines += [[PLAN_COLUMNS[name].show(row[name]) for name in shown] for row in frame.to_dict("records")]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
