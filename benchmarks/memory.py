"""Bytes of a rank at rest and at the peak of a step, beside the formula, for each choice, workload and world size.

    python benchmarks/memory.py --choices baseline,zero3,pytorch_zero3 --workloads transformer-small --ranks 2,4

`benchmarks/strategies.py --rounds 0` measures each in processes of its own, so that nothing an earlier choice held is
counted or in the way. Every rank trains on one sample a step.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import sharding
from benchmarks.collectives import names_of, numbers
from ddp_lab.runtime.cli import OneLineParser
from ddp_lab.runtime.data.workloads import WORKLOADS

if TYPE_CHECKING:
    import pandas as pd

MIB = 2**20


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known, choices = list(sharding.REGISTRY.sentences), ",".join(sharding.CHOICES)
    parser.add_argument("--choices", type=names_of("strategy", known), default=choices, help=f"default: {choices}")
    parser.add_argument("--workloads", type=names_of("workload", list(WORKLOADS)), default="sample", help="or several")
    parser.add_argument("--ranks", type=numbers, default="2", help="numbers of processes, such as 2,4; default: 2")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    import pandas as pd

    runs = list(itertools.product(options.workloads, options.ranks, options.choices))
    measured = [table for table in (measure(*run) for run in runs) if table is not None]
    if measured:
        table = pd.concat(measured, ignore_index=True)
        show(table)
        if options.csv:
            table.to_csv(options.csv, index=False)
            print(f"table: {options.csv}")
    return 0 if len(measured) == len(runs) else 1


def measure(workload: str, ranks: int, choice: str) -> "pd.DataFrame | None":
    """The row of one choice; none, and an error line, where it could not be run."""
    import pandas as pd

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.csv"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        flags = ["--rounds", "0", "--choices", choice, "--workload", workload, "--global-batch-size", str(ranks)]
        command = [*launcher, str(ROOT / "benchmarks" / "strategies.py"), *flags, "--csv", str(path)]
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode:
            lines = answer.stderr.splitlines()
            reason = next((line for line in lines if line.startswith("error: ")), "error: a rank was killed or failed")
            print(f"{reason} ({choice}, {workload}, {ranks} ranks)", file=sys.stderr)
            return None
        return pd.read_csv(path)


def show(table: "pd.DataFrame") -> None:
    for (workload, ranks), rows in table.groupby(["workload", "world_size"], sort=False):
        print(f"{workload}, {rows.elements.iloc[0] / 1e6:.1f} M parameters, {ranks} ranks: MiB a rank")
        held = rows.set_index("choice")[["resting_bytes", "expected_resting_bytes", "peak_bytes"]] / MIB
        held.insert(2, "difference", held.resting_bytes - held.expected_resting_bytes)
        names = {"resting_bytes": "at rest", "expected_resting_bytes": "formula", "peak_bytes": "peak"}
        print(held.rename(columns=names).rename_axis(None).to_string(float_format="{:,.2f}".format))


if __name__ == "__main__":
    sys.exit(main())
