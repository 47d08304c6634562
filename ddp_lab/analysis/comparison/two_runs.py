"""Reports on runs of one choice: what changed from a baseline to later runs."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from ddp_lab.analysis.columns import COLUMNS, CsvColumn, print_table
from ddp_lab.analysis.comparison.changes import EQUAL, Run, changes
from ddp_lab.analysis.comparison.choices import last_window
from ddp_lab.analysis.comparison.fairness import differences as settings_apart
from ddp_lab.analysis.comparison.fairness import require_comparable
from ddp_lab.analysis.comparison.traced import keep
from ddp_lab.analysis.files import write_csv
from ddp_lab.analysis.metrics.significance import EXPECTED_SPREAD
from ddp_lab.analysis.record import failure_of, leaves_traces, read_record
from ddp_lab.analysis.report.pages.heads import audit_lines, banner, labels
from ddp_lab.analysis.sentences import say
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.runtime.errors import UserError

SUFFIX = ".run.json"
SIDES = ("baseline", "run")
DIGITS = {"nats": 6}
ALWAYS_SHOWN = ("step time", "throughput", "collectives", "payload", "peak memory")


def report_on_two_runs(
    trace_dir: Path, baseline: Sequence[str], run: Sequence[str], folder: Path, allowed: Iterable[str] = ()
) -> tuple[pd.DataFrame, Path]:
    """Write `changes.csv` into `folder`, print what changed, and return the table and the file's path.

    Args:
        trace_dir: `profile/<choice>`.
        baseline: Run ids in `trace_dir`, or paths of run records anywhere, with the rank folders beside them. If empty:
            the latest completed run in `trace_dir` that is not in `run`, or the last but one if `run` is empty too.
        run: The later runs, named in the same way. If empty: the latest completed run that is not in `baseline`.
        allowed: Settings in which the runs may differ, named as in `ddp_lab.analysis.comparison.fairness.FIELDS`.

    Raises:
        UserError: a run is missing or cannot be read, or the two cannot be compared.
    """
    # the runs, and whether they can be compared
    completed = completed_runs(trace_dir)
    sides = both_sides(trace_dir, completed, baseline, run)
    records = {path: read_record(path) for side in sides for path in side}
    first_path, first = next(iter(records.items()))
    for path, record in records.items():
        if record["choice"] != first["choice"]:
            raise UserError(
                f"{first_path} is of {first['choice']}, but {path} of {record['choice']}; to compare strategies, give "
                "ddp or sharding instead of a folder"
            )
    names = {
        path: f"{name} {records[path]['run_id']}" for name, side in zip(SIDES, sides, strict=True) for path in side
    }
    differences = require_comparable({names[path]: record for path, record in records.items()}, allowed)
    earlier = [
        record
        for path, record in completed.items()
        if path not in records and not settings_apart({"": first, path.name: record})
    ]
    # what changed
    runs = {path: load(path, record) for path, record in records.items()}
    old, new = ([runs[path] for path in side] for side in sides)
    table, path = changes(old, new, earlier), folder / "changes.csv"
    write_csv(path, table)
    # the table and its sentences
    console = Console()
    print_changes(table, console)
    lines = [
        f"Compared: {', '.join(names.values())}.",
        banner(differences, "run"),
        *(line for record in records.values() for line in labels(record)),
        *audit_lines({names[path]: loaded.traced.failed_checks for path, loaded in runs.items() if loaded.traced}),
        say("changes", table.iloc[0], [*table[2:].itertuples()]),  # throughput says the same as step time
        say("how_sure", table.iloc[0], [len(old), len(new)], len(earlier), EXPECTED_SPREAD),
    ]
    for line in filter(None, dict.fromkeys(lines)):
        console.print(line, markup=False, highlight=False)
    return table, path


def completed_runs(trace_dir: Path) -> dict[Path, dict[str, Any]]:
    """Records of the completed runs in a folder, the earliest first.

    Raises:
        UserError: a record cannot be read.
    """
    records = {path: read_record(path, failed_too=True) for path in sorted(trace_dir.glob(f"*{SUFFIX}"))}
    return {path: record for path, record in records.items() if not failure_of(record)}


def record_path(trace_dir: Path, run: str) -> Path:
    """The record of a run that a user names.

    Raises:
        UserError: there is none; the message lists the existing ones.
    """
    path = Path(run) if run.endswith(SUFFIX) else trace_dir / f"{run}{SUFFIX}"
    if not path.is_file():
        runs = ", ".join(sorted(file.name.removesuffix(SUFFIX) for file in trace_dir.glob(f"*{SUFFIX}"))) or "none"
        raise UserError(f"{path}: no such run record; runs in {trace_dir}: {runs}")
    return path


def both_sides(trace_dir: Path, completed: Iterable[Path], *sides: Sequence[str]) -> list[list[Path]]:
    """The records of both sides, the earlier first. An empty side gets the latest completed run that no side names.

    Raises:
        UserError: too few runs are completed.
    """
    paths = [[record_path(trace_dir, run) for run in side] for side in sides]
    names = [path.name for side in paths for path in side]
    candidates = [path for path in completed if path.name not in names]
    if len(candidates) < (missing := paths.count([])):
        besides = " besides the one given" if names else ""
        raise UserError(
            f"{trace_dir}: has {len(candidates)} completed run(s){besides}, and two are compared; train again, or give "
            "--baseline and --run"
        )
    latest = iter(candidates[len(candidates) - missing :])
    return [side or [next(latest)] for side in paths]


def load(path: Path, record: dict[str, Any]) -> Run:
    """A run with its record, and what comparisons need of its last profile window if it has one.

    Raises:
        UserError: a trace cannot be read.
    """
    if not leaves_traces(record):
        return Run(record, None)
    analysis = analyse_window(last_window(path.parent, record["run_id"]))
    no_figures = f"; so run {record['run_id']} has no figures of traces"
    for warning in [*(problem + no_figures for problem in analysis.problems), *analysis.doubts]:
        print(f"warning: {warning}", file=sys.stderr)
    return Run(record, None if analysis.problems else keep(analysis))


def print_changes(table: pd.DataFrame, console: Console) -> None:
    """The rows that are not equal, and a few that are always shown."""
    chosen = table[(table["result"] != EQUAL) | table["figure"].isin(ALWAYS_SHOWN)]
    in_bytes = chosen["unit"].str.startswith("bytes")
    in_mib = {side: chosen[side].where(~in_bytes, chosen[side] / 2**20) for side in SIDES}
    chosen = chosen.assign(unit=chosen["unit"].str.replace("bytes", "MiB"), **in_mib)
    shown = chosen.assign(
        change=chosen["change_pct"].map(lambda percent: say("signed", percent)),
        interval=[say("interval", row) for row in chosen.itertuples()],
        baseline=[*map(number, chosen["baseline"], chosen["unit"])],
        run=[*map(number, chosen["run"], chosen["unit"])],
    )
    columns = COLUMNS["changes"] | {"interval": CsvColumn("95 % interval", "", "")}
    names = ("figure", "unit", "baseline", "run", "change", "interval", "result")
    print_table(shown, {name: columns[name] for name in names}, ("figure", "unit", "result"), console)
    if len(chosen) < len(table):
        console.print(f"and {len(table) - len(chosen)} figures that are equal")


def number(value: float, unit: str) -> str:
    return "–" if value != value else f"{value:,.{DIGITS.get(unit, 2)}f}"
