"""Reports on two runs of one choice: what changed from a baseline to a later run."""

import sys
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from ddp_lab.analysis.comparison.changes import EQUAL, Run, changes, rows_of, signed, summary
from ddp_lab.analysis.comparison.choices import last_window, print_whole
from ddp_lab.analysis.comparison.fairness import require_comparable
from ddp_lab.analysis.comparison.traced import keep
from ddp_lab.analysis.files import write_csv
from ddp_lab.analysis.record import failure_of, leaves_traces, read_record
from ddp_lab.analysis.report.pages.heads import audit_lines, banner, labels
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.runtime.errors import UserError

SUFFIX = ".run.json"
DIGITS = {"bytes": 0, "bytes/step": 0, "nats": 6}
ALWAYS_SHOWN = ("step time", "throughput", "collectives", "payload", "peak memory")


def report_on_two_runs(
    trace_dir: Path, baseline: str | None, run: str | None, folder: Path, allowed: Iterable[str] = ()
) -> tuple[pd.DataFrame, Path]:
    """Write `changes.csv` into `folder`, print what changed, and return the table and the file's path.

    Args:
        trace_dir: `profile/<choice>`.
        baseline: A run id in it, or the path of a run record anywhere. The rank folders lie beside the record. None for
            the latest other completed run in `trace_dir`; if `run` is None, too, the one before the latest.
        run: The later run, given in the same way.
        allowed: Settings in which the runs may differ, named as in `ddp_lab.analysis.comparison.fairness.FIELDS`.

    Raises:
        UserError: a run is missing or cannot be read, or the two cannot be compared.
    """
    old_path, new_path = both_paths(trace_dir, baseline, run)
    old, new = read_record(old_path), read_record(new_path)
    if old["choice"] != new["choice"]:
        raise UserError(
            f"{old_path} is of {old['choice']}, but {new_path} of {new['choice']}; to compare choices, give ddp or "
            "sharding instead of a folder"
        )
    differences = require_comparable({f"baseline {old['run_id']}": old, f"run {new['run_id']}": new}, allowed)
    runs = {"baseline": load(old_path), "run": load(new_path)}
    table, path = changes(runs["baseline"], runs["run"]), folder / "changes.csv"
    write_csv(path, table)
    console = Console()
    print_changes(table, console)
    lines = [
        banner(differences, "run"),
        *(line for each in runs.values() for line in labels(each.record)),
        *audit_lines({name: each.traced.failed_checks for name, each in runs.items() if each.traced}),
        summary(table),
    ]
    for line in filter(None, dict.fromkeys(lines)):
        console.print(line, markup=False, highlight=False)
    return table, path


def record_path(trace_dir: Path, run: str) -> Path:
    """The record of a run that a user names.

    Raises:
        UserError: there is none; the message lists the existing ones.
    """
    path = Path(run) if run.endswith(SUFFIX) else trace_dir / f"{run}{SUFFIX}"
    if not path.is_file():
        there = ", ".join(other.name.removesuffix(SUFFIX) for other in records_in(trace_dir)) or "none"
        raise UserError(f"{path}: no such run record; runs in {trace_dir}: {there}")
    return path


def both_paths(trace_dir: Path, *runs: str | None) -> list[Path]:
    """The records of two runs, the earlier first. Those not given are the latest others of completed runs.

    Raises:
        UserError: there is none.
    """
    given = [record_path(trace_dir, run) if run else None for run in runs]
    names = [path.name for path in given if path]
    others = [path for path in records_in(trace_dir) if path.name not in names]
    others = [path for path in others if not failure_of(read_record(path, failed_too=True))] if None in given else []
    if len(others) < (missing := given.count(None)):
        besides = " besides the one given" if names else ""
        raise UserError(
            f"{trace_dir}: has {len(others)} completed run(s){besides}, and two are compared; train again, or give "
            "--baseline and --run"
        )
    latest = iter(others[len(others) - missing :])
    return [path or next(latest) for path in given]


def records_in(trace_dir: Path) -> list[Path]:
    return sorted(trace_dir.glob(f"*{SUFFIX}"))


def load(path: Path) -> Run:
    """A run's record, and what comparisons need of its last profile window if it has one.

    Raises:
        UserError: the record or a trace cannot be read.
    """
    record = read_record(path)
    if not leaves_traces(record):
        return Run(record, None)
    analysis = analyse_window(last_window(path.parent, record["run_id"]))
    no_figures = f"; so run {record['run_id']} has no figures of traces"
    for said in [*(problem + no_figures for problem in analysis.problems), *analysis.doubts]:
        print(f"warning: {said}", file=sys.stderr)
    return Run(record, None if analysis.problems else keep(analysis))


def print_changes(table: pd.DataFrame, console: Console) -> None:
    """The rows that are not equal, and a few that are always shown."""
    shown = Table(box=None, pad_edge=False)
    for label in ("figure", "unit", "baseline", "run", "change", "95 % interval", "result"):
        shown.add_column(label, justify="left" if label in ("figure", "unit", "result") else "right", no_wrap=True)
    rows = rows_of(table)
    chosen = [row for row in rows if row.result != EQUAL or row.figure in ALWAYS_SHOWN]
    for row in chosen:
        known = row.interval_low == row.interval_low
        interval = f"{signed(row.interval_low)} to {signed(row.interval_high)}" if known else "–"
        percent = signed(row.change_pct) if row.change_pct == row.change_pct else "–"
        values = (number(value, row.unit) for value in (row.baseline, row.run))
        shown.add_row(row.figure, row.unit, *values, percent, interval, row.result)
    print_whole(shown, console)
    if len(chosen) < len(rows):
        console.print(f"and {len(rows) - len(chosen)} figures that are equal")


def number(value: float, unit: str) -> str:
    return "–" if value != value else f"{value:,.{DIGITS.get(unit, 2)}f}"
