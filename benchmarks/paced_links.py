"""Step times over links that `--link` paces, against the same links in the link lab, where the kernel shapes them.

    sudo python benchmarks/paced_links.py --rates 250mbit,1gbit,10gbit --ranks 2,4 --csv FILE

Needs what the link lab needs: Linux, root and iproute2. In each round `benchmarks/strategies.py` runs once in the lab
and once with `--link`, so that a machine which drifts does so for both. The ratio of a choice is paced over lab, each
the median of a run; the table has its median over rounds and its extremes. Under the table: of the pairs of choices
that differ in the lab by more than `CHANCE`, in every round in the same direction, how many are in the same order when
paced.

Exit code 0: measured. 1: a run failed, and has said why on standard error. 2: wrong command line.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.runtime.cli import OneLineParser, at_least, rate

CHOICES = (
    "simple_ddp,simple_ddp_ga,flat_ddp,simple_ddp_hook,simple_ddp_async,bucket_ddp_async,pytorch_ddp,"
    "zero1,zero2,zero3,pytorch_zero1,pytorch_zero2,pytorch_zero3"
)
CHANCE = 0.05
"""A difference between two choices in the lab that is smaller may be one of chance."""


def main() -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rates", default="250mbit,1gbit,10gbit", help="with commas between (default: %(default)s)")
    add("--ranks", default="2,4", help="numbers of ranks, with commas between (default: %(default)s)")
    add("--choices", default=CHOICES, help="default: all")
    add("--rounds", type=at_least(1), default=2, help="of one run in the lab and one paced (default: 2)")
    add("--rounds-in-a-run", type=at_least(1), default=2, help="of three steps of each choice (default: 2)")
    add("--csv", type=Path, metavar="FILE", help="also write the table here")
    options = parser.parse_args()
    import pandas as pd

    rows = []
    for ranks, link in itertools.product(map(int, options.ranks.split(",")), map(rate, options.rates.split(","))):
        runs = itertools.product(range(options.rounds), ("lab", "paced"))
        found = pd.concat(
            [measure(options, ranks, str(link), way).assign(round=number, way=way) for number, way in runs]
        )
        table = compare(found)
        rows.append(table.assign(ranks=ranks, link=str(link)))
        print(
            f"\n{ranks} ranks, links of {link}",
            table.round(3).to_string(index=False),
            order(found),
            sep="\n",
            flush=True,
        )
        if options.csv:
            pd.concat(rows).to_csv(options.csv, index=False)
    return 0


def measure(options: argparse.Namespace, ranks: int, link: str, way: str):
    """Columns choice, step_ms_median of one run; `way` is `lab` or `paced`."""
    import pandas as pd

    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "table.csv")
        script = ["benchmarks/strategies.py", "--choices", options.choices, "--csv", str(table)]
        script += ["--rounds", str(options.rounds_in_a_run), "--global-batch-size", str(4 * ranks)]
        start = {
            "lab": ["scripts/link_lab.py", "--nodes", str(ranks), "--rate", link, "--"],
            "paced": ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"],
        }
        flags = ["--link", link] if way == "paced" else []
        done = subprocess.run([sys.executable, *start[way], *script, *flags], cwd=ROOT, stdout=subprocess.DEVNULL)
        if done.returncode:
            sys.exit(f"error: {way}, {ranks} ranks, {link}: exit code {done.returncode}")
        return pd.read_csv(table)[["choice", "step_ms_median"]]


def compare(found):
    """A row a choice: its times in ms, and the ratio paced over lab."""
    times = found.pivot_table(index=["choice", "round"], columns="way", values="step_ms_median", sort=False)
    by_choice = times.assign(ratio=times["paced"] / times["lab"]).groupby("choice", sort=False)
    table = by_choice.median()
    table["ratio_min"], table["ratio_max"] = by_choice["ratio"].min(), by_choice["ratio"].max()
    return table.reset_index()


def order(found) -> str:
    """How many pairs of choices are in the same order."""
    by_way = found.groupby("way")
    times = {way: rows.pivot(index="round", columns="choice", values="step_ms_median") for way, rows in by_way}
    kept = seen = 0
    for one, other in itertools.combinations(times["lab"], 2):
        ratios = times["lab"][one] / times["lab"][other]
        if (ratios > 1 + CHANCE).all() or (ratios < 1 - CHANCE).all():
            seen += 1
            paced = times["paced"][one].median() / times["paced"][other].median()
            kept += (paced > 1) == (ratios.median() > 1)
    return f"order: {kept} of {seen} pairs that differ in the lab are in the same order"


if __name__ == "__main__":
    sys.exit(main())
