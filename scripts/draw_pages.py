"""Make the pictures and figures of docs/how-it-works anew: train with each hand-written strategy, on the CPU.

python scripts/draw_pages.py            about three minutes on two idle cores
python scripts/draw_pages.py --check    exit code 1 if a page lacks its picture or its figures; trains nothing
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.analysis.report.pages.strategy_page import PICTURE, filled, problems, run_block, without_picture
from ddp_lab.runtime.config import labelled
from ddp_lab.runtime.mesh import Mesh
from scripts.runs import FAMILIES, Family

if TYPE_CHECKING:
    from ddp_lab.analysis.report.figures.traced_step import TracedStep
    from ddp_lab.analysis.summary import WindowAnalysis

PAGES = ROOT / "docs" / "how-it-works"
RANKS = 2
PROFILED = ["--device", "cpu", "--profile-wait", "2", "--profile-warmup", "1", "--profile-active", "10"]
FLAGS = [
    *("--workload", "mlp", "--depth", "12", "--width", "1024"),
    *("--global-batch-size", "512", "--grad-accum-steps", "2", "--train-samples", "6656", "--eval-samples", "32"),
]
"""Layers of equal size, so that each can be told from the next in a picture."""
MORE_FLAGS = {"bucket_ddp_async": ["--bucket-cap-mb", "12"]}
"""Three layers a bucket, on every machine; by itself, the strategy would fit its buckets to the link."""
DPI = 150


@dataclass(frozen=True)
class Meshed:
    """A run on a mesh, whose picture a page shows.

    Attributes:
        behind: What the name of its folder has behind the mesh.
    """

    choice: str
    script: str
    mesh: str
    flags: Sequence[str]
    behind: str = ""

    @property
    def label(self) -> str:
        return labelled(self.choice, Mesh.parse(self.mesh).label + self.behind)


MESHED = {
    "tensor_parallel": Meshed(
        "tp",
        "main_parallel.py",
        "tp=2",
        [
            *("--workload", "sample-lm", "--global-batch-size", "32", "--grad-accum-steps", "1", "--max-steps", "13"),
            *("--sequence-parallel", "--async-tensor-parallel", "2", "--link", "1gbit"),
        ],
        "-sp-async2",
    ),
    "mesh": Meshed(
        "zero2",
        "main_parallel.py",
        "dp=2,tp=2",
        ["--workload", "sample-lm", "--clip-grad-norm", "1", "--max-steps", "13"],
    ),
    "hsdp": Meshed(
        "zero3",
        "main_shard.py",
        "replicate=2,shard=2",
        [
            *("--workload", "mlp", "--depth", "12", "--width", "512", "--max-steps", "13", "--train-samples", "1664"),
            *("--global-batch-size", "128", "--link", "10gbit", "--nodes", "2", "--outer-link", "1gbit"),
        ],
    ),
}
"""By page. Each picture has axes of its own."""


def hand_written() -> dict[str, Family]:
    """The choices whose code is in this repository's ddp/ and sharding/, one name for each class."""
    found = {}
    for folder, family in FAMILIES.items():
        for choice in family.registry.sentences:
            if family.registry.location(choice).startswith(f"{folder}."):
                found[choice] = family
    return found


def train(script: str, choice: str, ranks: int, flags: Sequence[str], output_dir: Path) -> None:
    """One run under torchrun. Leaves the process if it fails; the run's own messages are on standard error."""
    print(choice, *flags, flush=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    run = [script, "--ddp-choice", choice, "--output-dir", str(output_dir), *PROFILED, *flags]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if subprocess.run([*torchrun, *run], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"error: {choice}: the run failed")


def train_all(runs: Path) -> None:
    for choice, family in hand_written().items():
        train(family.script, choice, RANKS, [*FLAGS, *MORE_FLAGS.get(choice, [])], runs)
    for run in MESHED.values():
        train(run.script, run.choice, Mesh.parse(run.mesh).size, ["--mesh", run.mesh, *run.flags], runs)


def traced_step(runs: Path, label: str) -> "tuple[TracedStep, WindowAnalysis]":
    """Of the newest run of this label. Leaves the process if it is not as announced."""
    from ddp_lab.analysis.report.figures.traced_step import TracedStep
    from ddp_lab.analysis.summary import analyse_window
    from ddp_lab.analysis.traces.finding import find_windows
    from ddp_lab.analysis.traces.reading import read_trace

    window = find_windows(runs / "profile" / label)[-1]
    analysis = analyse_window(window)
    wrong = [*analysis.problems, *analysis.audit.loc[analysis.audit["result"] == "fail", "subject"]]
    if analysis.record is None or wrong:
        sys.exit(f"error: {label}: {'; '.join(wrong) or 'no run record'}")
    return TracedStep.shortest(analysis.timelines[0], read_trace(window.files[0]), analysis.record), analysis


def draw_all(runs: Path, pages: Path) -> None:
    """Draw the pictures, and fill the figures in, from the newest run of each choice under `runs`."""
    from ddp_lab.analysis.columns import MIB
    from ddp_lab.analysis.report.figures.step_picture import draw

    def save(page: str, step: "TracedStep", most_mib: float, most_ms: float) -> None:
        draw(step, most_mib, most_ms).savefig(pages / PICTURE.format(choice=page), dpi=DPI)

    def limits(*steps: "TracedStep") -> tuple[float, float]:
        """Where the axes of pictures that readers compare end: of memory, and of time."""
        most_mib = max(step.memory()["total"].max() for step in steps) * MIB
        return 1.15 * most_mib, 1.02 * max(step.ms for step in steps)

    steps: dict[str, TracedStep] = {}
    for choice in hand_written():
        step, analysis = traced_step(runs, choice)
        steps[choice] = step
        parts = analysis.exposure.steps.set_index(["rank", "step"]).loc[(0, step.number)]
        page = pages / f"{choice}.md"
        page.write_text(filled(page.read_text(), run_block(step, parts["exposed_ms"])))
    for choice, step in steps.items():
        save(choice, step, *limits(*steps.values()))
    for name, run in MESHED.items():
        step, _ = traced_step(runs, run.label)
        save(name, step, *limits(step))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="train nothing; say what is missing")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="train nothing; take the runs in this --output-dir")
    options = parser.parse_args()
    if not options.check:
        with tempfile.TemporaryDirectory(prefix="ddp-lab-") as folder:
            runs = options.runs or Path(folder)
            if options.runs is None:
                train_all(runs)
            draw_all(runs, PAGES)
    found = problems(PAGES, hand_written())
    for name in MESHED:
        found += without_picture(PAGES / f"{name}.md", PICTURE.format(choice=name))
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
