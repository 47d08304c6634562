"""Make the pictures and figures of docs/how-it-works anew: train with each hand-written strategy, on the CPU.

python scripts/draw_pages.py    about three minutes on two idle cores
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.analysis.report.pages.strategy_page import PICTURE, filled, run_block
from ddp_lab.families import FAMILIES, Family
from ddp_lab.runtime.config import labelled
from ddp_lab.runtime.mesh import Mesh

if TYPE_CHECKING:
    from ddp_lab.analysis.report.figures.traced_step import TracedStep
    from ddp_lab.analysis.summary import WindowAnalysis

PAGES = ROOT / "docs" / "how-it-works"
PROFILED = "--device cpu --profile-wait 2 --profile-warmup 1 --profile-active 10"
FLAGS = (
    "--workload mlp --depth 12 --width 1024 --global-batch-size 512 --grad-accum-steps 2 --train-samples 6656 "
    "--eval-samples 32"
)
"""Layers of equal size, so that each can be told from the next in a picture."""
MORE_FLAGS = {"bucket_ddp_async": "--bucket-cap-mb 12"}
"""Three layers a bucket."""
MESHED = {
    "tensor_parallel": (
        ("main_parallel.py", "tp", "tp=2", "-sp-async2"),
        "--workload sample-lm --global-batch-size 32 --grad-accum-steps 1 --max-steps 13 --sequence-parallel "
        "--async-tensor-parallel 2 --link 1gbit",
    ),
    "mesh": (
        ("main_parallel.py", "zero2", "dp=2,tp=2", ""),
        "--workload sample-lm --clip-grad-norm 1 --max-steps 13",
    ),
    "hsdp": (
        ("main_shard.py", "zero3", "replicate=2,shard=2", ""),
        "--workload mlp --depth 12 --width 512 --max-steps 13 --train-samples 1664 --global-batch-size 128 "
        "--link 10gbit --nodes 2 --outer-link 1gbit",
    ),
}
"""By page: script, choice, mesh, what the folder's name has behind the mesh, and flags. Each has axes of its own."""


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
    run = [script, "--ddp-choice", choice, "--output-dir", str(output_dir), *PROFILED.split(), *flags]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if subprocess.run([*torchrun, *run], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"error: {choice}: the run failed")


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
        draw(step, most_mib, most_ms).savefig(pages / PICTURE.format(choice=page), dpi=150)

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
    for name, ((_, choice, mesh, behind), _) in MESHED.items():
        step, _ = traced_step(runs, labelled(choice, Mesh.parse(mesh).label + behind))
        save(name, step, *limits(step))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="ddp-lab-") as folder:
        runs = Path(folder)
        for choice, family in hand_written().items():
            train(family.script, choice, 2, f"{FLAGS} {MORE_FLAGS.get(choice, '')}".split(), runs)
        for (script, choice, mesh, _), flags in MESHED.values():
            train(script, choice, Mesh.parse(mesh).size, ["--mesh", mesh, *flags.split()], runs)
        draw_all(runs, PAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
