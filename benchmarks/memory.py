"""Bytes a rank at rest and at the worst moment of a step, beside the formula: a row a choice, workload and world size.

    python benchmarks/memory.py --choices baseline,zero3,pytorch_zero3 --workloads transformer-small --ranks 2,4

Each is measured by `benchmarks/strategies.py --rounds 0` in processes of its own, so that nothing an earlier choice
held is counted or in the way. Every rank trains on one sample a step.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import sharding
from training.cli import OneLineParser, exit_with_error, unknown_name
from training.data.workloads import WORKLOADS

TIMEOUT_S = 1800
MIB = 2**20


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", default=",".join(sharding.CHOICES), help="comma-separated; default: %(default)s")
    parser.add_argument("--workloads", default="sample", help="comma-separated; default: %(default)s")
    parser.add_argument("--ranks", default="2", help="numbers of processes, comma-separated; default: %(default)s")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)
    options.choices, options.workloads = options.choices.split(","), options.workloads.split(",")
    for kind, given, known in (
        ("strategy", options.choices, sharding.REGISTRY.sentences),
        ("workload", options.workloads, WORKLOADS),
    ):
        for name in given:
            if name not in known:
                exit_with_error(unknown_name(kind, name, known))
    try:
        options.ranks = [int(number) for number in options.ranks.split(",")]
    except ValueError:
        exit_with_error(f"--ranks {options.ranks}: must be numbers with commas between, such as 2,4")
    return options


def main() -> int:
    options = parse()
    import pandas as pd
    from rich.progress import track

    runs = [(w, n, c) for w in options.workloads for n in options.ranks for c in options.choices]
    tables = [measure(*run) for run in track(runs, "measuring", transient=True, disable=not sys.stderr.isatty())]
    measured = [table for table in tables if table is not None]
    if measured:
        table = pd.concat(measured, ignore_index=True)
        show(table)
        if options.csv:
            table.to_csv(options.csv, index=False)
            print(f"table: {options.csv}")
    return 0 if len(measured) == len(runs) else 1


def measure(workload: str, ranks: int, choice: str) -> "pd.DataFrame | None":  # noqa: F821
    """The row of one choice; none, and an error line, where it could not be run."""
    import pandas as pd

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.csv"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        flags = ["--rounds", "0", "--choices", choice, "--workload", workload, "--global-batch-size", str(ranks)]
        command = [*launcher, str(ROOT / "benchmarks" / "strategies.py"), *flags, "--csv", str(path)]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"error: {choice}, {workload}, {ranks} ranks: not done after {TIMEOUT_S} s", file=sys.stderr)
            return None
        if answer.returncode:
            lines = answer.stderr.splitlines()
            reason = next((line for line in lines if line.startswith("error: ")), "error: a rank was killed or failed")
            print(f"{reason} ({choice}, {workload}, {ranks} ranks)", file=sys.stderr)
            return None
        return pd.read_csv(path)


def show(table: "pd.DataFrame") -> None:  # noqa: F821
    from rich.console import Console
    from rich.table import Table

    for (workload, ranks), rows in table.groupby(["workload", "world_size"], sort=False):
        print(f"{workload}, {rows.elements.iloc[0] / 1e6:.1f} M parameters, {ranks} ranks: MiB a rank")
        shown = Table("choice", box=None)
        for heading in ("at rest", "formula", "difference", "peak"):
            shown.add_column(heading, justify="right")
        for row in rows.itertuples():
            beyond = row.resting_bytes - row.expected_resting_bytes
            held = (row.resting_bytes, row.expected_resting_bytes, beyond, row.peak_bytes)
            shown.add_row(row.choice, *(f"{value / MIB:,.2f}" for value in held))
        Console(width=100).print(shown)


if __name__ == "__main__":
    sys.exit(main())
