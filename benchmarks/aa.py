"""How often a comparison of equal runs finds a difference, and how often it finds one that is there.

    ddp-lab bench aa --choice zero3 --runs 10 --max-steps 40

Trains with one command again and again, each time in fresh processes, and compares the runs as `ddp-lab compare` does:
each pair of runs, and each two groups of three. Equal runs differ by chance alone, so every verdict is wrong. Then the
step times of one group are made longer by `--slower` percent, and a verdict that does not say so is wrong.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.rounds import print_table, table_parser
from ddp_lab.analysis.comparison.changes import Run, step_times
from ddp_lab.analysis.comparison.timing import timed_steps_ms, without_core
from ddp_lab.analysis.metrics.significance import LEVEL
from ddp_lab.analysis.record import read_record
from ddp_lab.progress import long_work
from ddp_lab.runtime.cli import ROOT, at_least, exit_with_error

GROUP = 3
"""Runs a side, beside single ones."""


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = table_parser("aa", __doc__)
    parser.add_argument("--choice", default="zero3", help="the strategy (default: zero3)")
    parser.add_argument("--ranks", type=at_least(1), default=2, help="of each run (default: 2)")
    parser.add_argument(
        "--runs", type=at_least(2 * GROUP), default=10, help="how many (default: 10, which are 45 pairs)"
    )
    parser.add_argument("--slower", type=at_least(0, float), default=8, metavar="PERCENT", help="planted (default: 8)")
    return parser.parse_known_args(arguments)


def train(options: argparse.Namespace, flags: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """The records of `options.runs` runs of one command."""
    command = [sys.executable, "-m", "ddp_lab", "train", options.choice, "--ranks", str(options.ranks), *flags]
    command += ["--no-profile", "--no-eval", "--output-dir", str(folder)]
    with long_work("training", options.runs) as tell:
        for _ in range(options.runs):
            finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if finished.returncode:
                exit_with_error(finished.stderr.strip() or finished.stdout.strip())
            tell("")
    return [read_record(path) for path in sorted((folder / "profile" / options.choice).glob("*.run.json"))]


def slower(record: dict[str, Any], percent: float) -> dict[str, Any]:
    """The record of a run whose steps take so much longer."""
    times = [None if seconds is None else seconds * (1 + percent / 100) for seconds in record["step_time_s"]]
    return record | {"step_time_s": times}


def verdicts(records: Sequence[dict[str, Any]], runs: int, percent: float) -> pd.Series:
    """What each comparison of two groups of `runs` finds, of which the later takes `percent` longer: -1, 0 or 1."""
    signs = []
    for old in combinations(range(len(records)), runs):
        for new in combinations(range(old[0] + 1, len(records)), runs):
            if not set(old) & set(new):
                later = [Run(slower(records[at], percent), None) for at in new]
                estimate = step_times([Run(records[at], None) for at in old], later, [])
                signs.append(int(np.sign(estimate.value)) if estimate.p_value <= LEVEL else 0)
    return pd.Series(signs)


def main(arguments: Sequence[str]) -> int:
    options, flags = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="ddp-lab-") as folder:
        records = train(options, flags, Path(folder))
    medians = pd.Series([timed_steps_ms(record).median() for record in records])
    print(f"median steps of {len(records)} equal runs, ms: {', '.join(f'{median:.1f}' for median in medians)}")
    print(f"standard deviation between runs: {np.log(medians).std():.1%}")
    busy = np.median([without_core(record) for record in records])
    print(f"share of a step in which a thread could run and had no core: {busy:.0%}")
    rows = []
    for runs in (1, GROUP):
        for percent in (0.0, options.slower):
            signs = verdicts(records, runs, percent)
            right = signs == (1 if percent else 0)
            rows.append((f"{runs} against {runs}", percent, len(signs), int(right.sum()), 100 * right.mean()))
    table = pd.DataFrame(rows, columns=["runs", "planted_pct", "comparisons", "right", "right_pct"])
    print_table(table.round(1), options.csv)
    return 0
