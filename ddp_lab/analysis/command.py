"""The body of `scripts/analyze_traces_*.py` and of `ddp-lab report`."""

import argparse
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_lab.analysis.traces.finding import SUFFIXES, Window, find_windows, group_by_window
from ddp_lab.progress import long_work
from ddp_lab.runtime.errors import UserError, listed
from ddp_lab.untrusted import add_limit

if TYPE_CHECKING:
    from ddp_lab.analysis.summary import WindowAnalysis

RUN_ID_TIME = re.compile(r"^(\d{8}-\d{6})")


def build_parser(prog: str | None = None, usage: str | None = None) -> argparse.ArgumentParser:
    description = "Turn the per-rank traces of one run into summary.html and summary.csv."
    parser = argparse.ArgumentParser(prog, usage, description, allow_abbrev=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace-dir", type=Path, help="folder with the traces of one strategy, e.g. profile/simple_ddp"
    )
    source.add_argument("--trace-files", type=Path, nargs="+", metavar="FILE", help="trace files, one of each rank")
    parser.add_argument(
        "--select",
        choices=("latest", "all"),
        default="latest",
        help="analyse the newest profile window, or all windows, each in its own folder (default: latest)",
    )
    parser.add_argument(
        "--include-last-step",
        action="store_true",
        help="analyse the last profiled step too; a GPU trace may have cut off its end",
    )
    parser.add_argument(
        "--enable-multiprocessing",
        action="store_true",
        help="read ranks in parallel, one process a core, at most 8",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        help="folder of the report (default: the trace folder with profile* replaced by reports*)",
    )
    add_limit(parser)
    return parser


def main(report_root: str, arguments: Sequence[str] | None = None) -> int:
    """Analyse as the command line says, and return the exit code. A problem is one line on standard error."""
    return report(build_parser().parse_args(arguments), report_root)


def report(options: argparse.Namespace, report_root: str) -> int:
    """Write the reports of `options`, and return the exit code."""
    try:
        pages = analyse(options, report_root)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for page in pages:
        print(f"report: {page}")
    return 0


def analyse(options: argparse.Namespace, report_root: str) -> list[Path]:
    """Write the reports of `options`, and return their pages.

    Raises:
        UserError: traces cannot be used, or reports cannot be written.
    """
    # find the windows
    if options.trace_files:
        for path in options.trace_files:
            if not path.is_file() or not path.name.endswith(SUFFIXES):
                raise UserError(f"{path}: no such trace file (*.json or *.json.gz)")
        trace_dir = options.trace_files[0].resolve().parent
        if re.match(r"rank[_-]?\d+$", trace_dir.name):
            trace_dir = trace_dir.parent
        windows = group_by_window(options.trace_files, trace_dir.name)
    else:
        trace_dir = options.trace_dir
        windows = find_windows(trace_dir)
    # report on each window
    chosen = windows if options.select == "all" else windows[-1:]
    folder = options.output_dir or report_folder(trace_dir, report_root)
    pages, problems = [], []
    for index, window in enumerate(chosen):
        target = folder / f"run_{index}_{window_time(window)}" if options.select == "all" else folder
        try:
            choice = trace_dir.resolve().name
            report_on_window(window, choice, target, options.include_last_step, options.enable_multiprocessing)
        except UserError as error:
            problems.append(error)
        else:
            pages.append(target / "summary.html")
    if not pages:
        raise problems[0]
    for problem in problems:
        print(f"warning: a window without a report: {problem}", file=sys.stderr)
    return pages


def report_on_window(
    window: Window,
    choice: str,
    folder: Path,
    include_last_step: bool = False,
    multiprocessing: bool = False,
    place: str = "",
) -> "WindowAnalysis":
    """Analyse one window, write its `summary.*` into `folder`, and return the analysis.

    Standard error shows the progress over ranks, and the `place` of this window among others, such as `3 of 7`.
    """
    from ddp_lab.analysis.report.pages.summary import write_summary
    from ddp_lab.analysis.summary import analyse_window

    with long_work(f"reading traces of {choice}{place and ', '}{place}", len(window.files)) as tell:
        analysis = analyse_window(window, include_last_step, multiprocessing, lambda rank: tell(""))
    for problem in [*analysis.problems, *analysis.doubts]:
        print(f"warning: {problem}", file=sys.stderr)
    if analysis.problems:
        used = listed([timeline.rank for timeline in analysis.timelines])
        print(f"warning: {folder}: incomplete, of rank {used} only, so no figure compares ranks", file=sys.stderr)
    write_summary(analysis, choice, folder)
    return analysis


def report_folder(trace_dir: Path, report_root: str) -> Path:
    """`profile_runpod/zero3` -> `reports_sharding/zero3`: the last part that begins with `profile` is replaced."""
    parts = list(trace_dir.parts)
    for index in range(len(parts) - 1, -1, -1):
        if parts[index].startswith("profile"):
            return Path(*parts[:index], report_root, *parts[index + 1 :])
    return Path(report_root, trace_dir.resolve().name)


def window_time(window: Window) -> str:
    """When the window's run began, from its id; otherwise when its first file was written."""
    if match := RUN_ID_TIME.match(window.run_id):
        return match[1]
    written = next(iter(window.files.values())).stat().st_mtime
    return datetime.fromtimestamp(written, UTC).strftime("%Y%m%d-%H%M%S")
