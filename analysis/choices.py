"""Reports on all choices of an entrypoint: each one's summary, and all of them side by side."""

import sys
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from analysis.columns import COMPARISON_COLUMNS
from analysis.command import build_parser, report_folder, report_on_window
from analysis.compare import REFERENCE, comparison, latest_record, require_comparable
from analysis.errors import TraceError
from analysis.report.compare_page import write_comparison
from analysis.traces import find_windows

SHOWN = (
    "choice",
    "step_time_ms_median",
    "step_time_ratio",
    "compute_pct",
    "non_compute_pct",
    "idle_pct",
    "overlap_pct",
    "collective_calls_per_step",
    "model_states_bytes",
    "peak_bytes",
    "peak_ratio",
    "eval_loss",
    "eval_accuracy",
)


def report_on_choices(output_dir: Path, report_root: str, choices: Iterable[str], failed: list[str]) -> Path:
    """Write `summary.*` of each choice and `compare.*` of all, print the table, answer with the page's path.

    Args:
        output_dir: Root of `profile/` and of the reports.
        report_root: Folder of the reports in it: `reports` or `reports_sharding`.
        choices: Those that have been trained; the latest run of each counts.
        failed: Those that gave no result, to be named on the page; a choice whose traces are broken is added.

    Raises:
        TraceError: there is nothing to compare, or the runs are not comparable.
    """
    options = build_parser("").parse_args(["--trace-dir", "."])
    found = {choice: latest_record(output_dir / "profile" / choice) for choice in choices}
    records = {choice: record for choice, record in found.items() if record is not None}
    require_comparable(records)
    summaries = {}
    for choice, record in records.items():
        if record["config"]["no_profile"]:
            continue
        trace_dir = output_dir / "profile" / choice
        try:
            windows = [window for window in find_windows(trace_dir) if window.run_id == record["run_id"]]
            if not windows:
                raise TraceError(f"{trace_dir}: no trace of run {record['run_id']}; train again")
            summaries[choice] = report_on_window(windows[-1], choice, report_folder(trace_dir, report_root), options)
        except TraceError as error:  # the choice's times still stand
            print(f"error: {choice}: {error}", file=sys.stderr)
            failed.append(choice)
    table = comparison(records, summaries, REFERENCE[report_root])
    print_table(table, Console())
    return write_comparison(table, records, REFERENCE[report_root], failed, output_dir / report_root)


def print_table(table: pd.DataFrame, console: Console) -> None:
    """The most important columns, wide enough for any terminal to wrap none of them."""
    shown = Table(box=None, pad_edge=False)
    for name in SHOWN:
        column = COMPARISON_COLUMNS[name]
        shown.add_column(
            f"{column.label}\n{column.unit}", justify="left" if name == "choice" else "right", no_wrap=True
        )
    for row in table.to_dict("records"):
        shown.add_row(*(COMPARISON_COLUMNS[name].show(row[name]) for name in SHOWN))
    console.print()
    if not console.is_terminal:
        console.width = 200
    console.print(shown)
