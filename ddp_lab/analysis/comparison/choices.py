"""Reports on all choices of an entrypoint: each one's summary, and all of them side by side."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from ddp_lab.analysis.columns import print_table
from ddp_lab.analysis.command import report_folder, report_on_window
from ddp_lab.analysis.comparison.compare import REFERENCE, columns_of, latest_record
from ddp_lab.analysis.comparison.fairness import BACKEND_CLASS, require_comparable, with_one_link
from ddp_lab.analysis.comparison.timing import passes_of, with_passes
from ddp_lab.analysis.comparison.traced import Traced, keep
from ddp_lab.analysis.mesh import mesh_of
from ddp_lab.analysis.metrics.exposure import exposure
from ddp_lab.analysis.record import leaves_traces, read_record
from ddp_lab.analysis.report.pages.compare import Compared, write_comparison
from ddp_lab.analysis.summary import read_rank
from ddp_lab.analysis.traces.finding import Window, find_windows
from ddp_lab.record_format import SHARED_GPU
from ddp_lab.runtime.errors import UserError

SHOWN = (
    "choice",
    "step_time_ms_median",
    "step_time_ratio",
    "verdict",
    "tokens_per_second",
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


def report_on_choices(
    output_dir: Path,
    report_root: str,
    choices: Iterable[str],
    failed: list[str],
    allowed: Iterable[str] = (),
    passes: Mapping[str, Mapping[int, str]] | None = None,
    unfinished: str = "",
) -> Path:
    """Write `summary.*` of each choice and `compare.*` of all, print the table, and return the page's path.

    Args:
        output_dir: Root of `profile/` and of the reports.
        report_root: Folder of the reports in it: `reports`, `reports_sharding` or `reports_parallel`.
        choices: Labels of trained choices (`ddp_lab.runtime.config.labelled`). The latest run of each counts.
        failed: Choices without a result, which the page names. A choice whose traces are broken is added.
        allowed: Settings in which the runs may differ, named as in `ddp_lab.analysis.comparison.fairness.FIELDS`.
        passes: Run ids of the latest sweep by choice and pass. All count if the latest run of a choice is one of them.
        unfinished: How far that sweep got, if it is not complete.

    Raises:
        UserError: there is nothing to compare, or the runs are not comparable.
    """
    # the latest runs, over one link
    latest = {choice: latest_record(output_dir / "profile" / choice) for choice in choices}
    records = {
        choice: in_passes(record, output_dir / "profile" / choice, (passes or {}).get(choice, {}))
        for choice, record in latest.items()
        if record is not None
    }
    if not records:
        raise UserError("no run record of any strategy to compare; train first")
    records, left_out = with_one_link(records)
    print(left_out + "\n" * bool(left_out), end="", flush=True)
    allowed = set(allowed)
    differences = require_comparable(records, allowed | {BACKEND_CLASS})
    if BACKEND_CLASS not in allowed:  # runs over different classes stand in one table, but are not compared
        differences = [difference for difference in differences if difference.name != BACKEND_CLASS]
    # the traces of each
    traced: dict[str, Traced] = {}
    incomplete: list[str] = []
    for number, (choice, record) in enumerate(records.items(), 1):
        if not leaves_traces(record):
            continue
        trace_dir = output_dir / "profile" / choice
        try:
            window = last_window(trace_dir, record["run_id"])
            place = f"{number} of {len(records)}"
            analysis = report_on_window(window, choice, report_folder(trace_dir, report_root), place=place)
            if analysis.problems:  # means over only some ranks cannot be compared
                incomplete.append(choice)
            else:
                first_pass = keep(analysis)
                later_passes = later_steps(trace_dir, passes_of(record))
                traced[choice] = replace(first_pass, steps={**first_pass.steps, **later_passes})
        except UserError as error:  # the choice's step times can still be used
            print(f"error: {choice}: {error}", file=sys.stderr)
            failed.append(choice)
    # side by side
    compared = Compared(records, traced, REFERENCE[report_root], failed, differences, incomplete, unfinished)
    for sharing in compared.table["gpu_sharing"].dropna().unique():
        print(f"{sharing}: {SHARED_GPU}")
    columns = columns_of(compared.table)
    names = [name for name in SHOWN if name != "tokens_per_second" or compared.table[name].notna().any()]
    print_table(compared.table, {name: columns[name] for name in names}, ("choice", "verdict"), Console())
    lines = [*map(str, compared.outcomes), *compared.unsteady, compared.unknown, unfinished]
    print("\n".join(filter(None, lines)))
    return write_comparison(compared, output_dir / report_root)


def in_passes(latest: dict[str, Any], folder: Path, passes: Mapping[int, str]) -> dict[str, Any]:
    """The record of the first pass, with all passes, if the latest run is of the sweep; else the latest record.

    Raises:
        UserError: a record cannot be read.
    """
    if latest["run_id"] not in passes.values() or 1 not in passes:
        return latest
    runs = {number: read_record(folder / f"{run_id}.run.json") for number, run_id in passes.items()}
    return with_passes(runs[1], runs)


def later_steps(trace_dir: Path, passes: Mapping[int, dict[str, Any]]) -> dict[int, pd.DataFrame]:
    """The table of `exposure.csv` of each pass but the first, if all its ranks can be read.

    Raises:
        UserError: there are no traces.
    """
    steps = {}
    for number, record in passes.items():
        if number > 1:
            files = last_window(trace_dir, record["run_id"]).files
            ranks = [read_rank(path, rank, include_last_step=False) for rank, path in files.items()]
            timelines = [rank for rank in ranks if not isinstance(rank, str)]
            if len(timelines) == len(files):
                steps[number] = exposure(timelines, len(files) == record["world_size"], mesh_of(record)).steps
    return steps


def last_window(trace_dir: Path, run_id: str) -> Window:
    """The last profile window of a run.

    Raises:
        UserError: it has no traces.
    """
    windows = [window for window in find_windows(trace_dir) if window.run_id == run_id]
    if not windows:
        raise UserError(f"{trace_dir}: no trace of run {run_id}; train again")
    return windows[-1]
