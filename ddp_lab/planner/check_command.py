"""`ddp-lab plan --check published`: plans of steps that others have measured, and how far off they are."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console
from rich.table import Table

from ddp_lab.planner.command import build_parser
from ddp_lab.planner.costs.sources import costs_of
from ddp_lab.planner.meshes import required
from ddp_lab.planner.plan import Case, Outcome, outcomes
from ddp_lab.planner.plan_command import case_of
from ddp_lab.progress import long_work
from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import fitted, settings_in

PUBLISHED = "published"
TABLE = Path(__file__).with_name("published.toml")
CLOSE = 0.1


class Measured(msgspec.Struct, forbid_unknown_fields=True):
    """A row of a table of measured steps.

    Attributes:
        plan: Flags of `ddp-lab plan` that describe it; one choice.
        tokens_per_s_gpu: Tokens a second of one device, padding included.
        source: Where that is from.
        compiled: Whether a compiler fused operators, also where the runner's --compile does not go.
        differs: In what the plan differs from what was measured, or why it is off.
    """

    plan: str
    tokens_per_s_gpu: float
    source: str
    compiled: bool = False
    differs: str = ""


@dataclass(frozen=True)
class Checked:
    """A row with its plan. Seconds are of a step."""

    name: str
    measured: Measured
    outcome: Outcome
    step_s: float

    @property
    def measured_step_s(self) -> float:
        return self._tokens / self.measured.tokens_per_s_gpu

    @property
    def planned_rate(self) -> float:
        """Tokens a second of one device."""
        return self._tokens / self.step_s

    @property
    def error(self) -> float:
        """Of the planned rate, as a part of the measured one."""
        return self.planned_rate / self.measured.tokens_per_s_gpu - 1

    @property
    def _tokens(self) -> float:
        case = self.outcome.case
        return case.config.global_batch_size * case.sequence_length / case.cluster.world_size


def run(options: argparse.Namespace, console: Console) -> None:
    """Plan each row, and print what was measured beside what is planned.

    Raises:
        UserError: the table cannot be read, or a row cannot be planned. Names it.
    """
    rows = read(TABLE if options.check == PUBLISHED else Path(options.check))
    for name in names_in(options.rows):
        if name not in rows:
            raise UserError(f"--rows: {unknown_name('row', name, rows)}")
    rows = {name: row for name, row in rows.items() if name in (names_in(options.rows) or rows)}
    tasks = [task_of(name, row) for name, row in rows.items()]
    found: list[Checked] = []
    with long_work(f"planning {len(tasks)} measured steps", len(tasks)) as tell:
        for (name, row), outcome in zip(rows.items(), outcomes(tasks, options.jobs), strict=True):
            if outcome.simulated is None:
                raise UserError(f"row {name}: {outcome.reason}")
            found.append(Checked(name, row, outcome, outcome.simulated.step_time_s))
            tell(f"{name}: {found[-1].error:+.1%}; {outcome.name}: {outcome.gist}")
    console.print(table(found), "")
    for line in summary(found):
        console.print(line)


def names_in(text: str | None) -> list[str]:
    return text.split(",") if text else []


def read(path: Path) -> Mapping[str, Measured]:
    """The rows of a table, by name.

    Raises:
        UserError: it cannot be read, or lacks something.
    """
    rows: Mapping[str, Measured] = fitted(
        settings_in(path, "--check"), dict[str, Measured], path, "table of measured steps"
    )
    return rows


def task_of(name: str, row: Measured) -> tuple[Case, str]:
    """What a row describes, and its choice.

    Raises:
        UserError: it makes no sense.
    """
    options, unknown = build_parser().parse_known_args(shlex.split(row.plan))
    if unknown or not options.choices or "," in options.choices:
        raise UserError(f"row {name}: plan = '{row.plan}': give flags of ddp-lab plan, and one of --choices")
    try:
        case = required(case_of(options))
    except UserError as error:
        raise UserError(f"row {name}: {error}") from None
    if row.compiled:
        case = replace(case, costs=costs_of(case.cluster, compiles=True))
    return case, options.choices


def table(found: Sequence[Checked]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for label in ("row", "model", "devices", "choice"):
        shown.add_column(f"{label}\n", no_wrap=True)
    for unit in ("tokens/s/GPU", "step, ms"):
        for of in ("measured", "planned"):
            shown.add_column(f"{of}\n{unit}", justify="right", no_wrap=True)
    shown.add_column("error\n%", justify="right", no_wrap=True)
    for one in found:
        cluster, model = one.outcome.case.cluster, one.outcome.case.model.name
        nodes = f"{cluster.nodes}x" if cluster.nodes > 1 else ""
        devices = f"{nodes}{cluster.ranks_per_node}x{cluster.device.name}"
        rates, times = (one.measured.tokens_per_s_gpu, one.planned_rate), (one.measured_step_s, one.step_s)
        shown.add_row(
            *(one.name, model.partition("/")[2] or model, devices, one.outcome.name),
            *(f"{rate:,.0f}" for rate in rates),
            *(f"{1e3 * seconds:,.1f}" for seconds in times),
            f"{one.error:+.1%}",
        )
    return shown


def summary(found: Sequence[Checked]) -> list[str]:
    """Mean error, how many are close, and the worst."""
    worst = max(found, key=lambda one: abs(one.error))
    close = sum(abs(one.error) <= CLOSE for one in found)
    why = f": {worst.measured.differs}" if worst.measured.differs else ""
    return [
        f"Mean error {fmean(abs(one.error) for one in found):.1%}; {close} of {len(found)} "
        f"({close / len(found):.0%}) within {CLOSE:.0%}.",
        f"Worst: {worst.name}, {worst.error:+.1%}{why}",
    ]
