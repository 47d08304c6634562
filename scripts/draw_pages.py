"""Make the pictures and figures of docs/how-it-works anew: train with each hand-written strategy, on the CPU.

python scripts/draw_pages.py            about two minutes on two idle cores
python scripts/draw_pages.py --check    exit code 1 if a page lacks its picture or its figures; trains nothing
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from analysis.report.pages.strategy_page import PICTURE, filled, problems, run_block
from scripts.runs import FAMILIES, Family

PAGES = ROOT / "docs" / "how-it-works"
RANKS = 2
FLAGS = [
    *("--device", "cpu", "--workload", "mlp", "--depth", "12", "--width", "1024"),
    *("--global-batch-size", "512", "--grad-accum-steps", "2", "--train-samples", "6656", "--eval-samples", "32"),
    *("--profile-wait", "2", "--profile-warmup", "1", "--profile-active", "10"),
]
"""Layers of equal size, so that each can be told from the next in a picture."""
MORE_FLAGS = {"bucket_ddp_async": ["--bucket-cap-mb", "12"]}
"""Three layers a bucket, on every machine; by itself, the strategy would fit its buckets to the link."""
DPI = 150


def hand_written() -> dict[str, Family]:
    """The choices whose code is in this repository's ddp/ and sharding/, one name for each class."""
    found = {}
    for folder, family in FAMILIES.items():
        for choice in family.registry.sentences:
            if family.registry.location(choice).startswith(f"{folder}."):
                found[choice] = family
    return found


def train(choice: str, family: Family, output_dir: Path) -> None:
    """One run under torchrun. Leaves the process if it fails; the run's own messages are on standard error."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    run = [family.script, "--ddp-choice", choice, "--output-dir", str(output_dir), *FLAGS, *MORE_FLAGS.get(choice, [])]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if subprocess.run([*torchrun, *run], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"error: {choice}: the run failed")


def draw_all(runs: Path, pages: Path) -> None:
    """Draw the pictures, and fill the figures in, from the newest run of each choice under `runs`."""
    from analysis.columns import MIB
    from analysis.report.figures.step_picture import draw
    from analysis.report.figures.traced_step import TracedStep
    from analysis.summary import analyse_window
    from analysis.traces.finding import find_windows
    from analysis.traces.reading import read_trace

    steps: dict[str, TracedStep] = {}
    for choice in hand_written():
        window = find_windows(runs / "profile" / choice)[-1]
        analysis = analyse_window(window)
        wrong = [*analysis.problems, *analysis.audit.loc[analysis.audit["result"] == "fail", "subject"]]
        if analysis.record is None or wrong:
            sys.exit(f"error: {choice}: {'; '.join(wrong) or 'no run record'}")
        step = TracedStep.shortest(analysis.timelines[0], read_trace(window.files[0]), analysis.record)
        steps[choice] = step
        parts = analysis.exposure.steps.set_index(["rank", "step"]).loc[(0, step.number)]
        page = pages / f"{choice}.md"
        page.write_text(filled(page.read_text(), run_block(step, parts["exposed_ms"])))
    most_mib = 1.15 * max(step.memory()["total"].max() for step in steps.values()) * MIB
    most_ms = 1.02 * max(step.ms for step in steps.values())
    for choice, step in steps.items():
        draw(step, most_mib, most_ms).savefig(pages / PICTURE.format(choice=choice), dpi=DPI)


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
            for choice, family in hand_written().items() if options.runs is None else ():
                print(choice, flush=True)
                train(choice, family, runs)
            draw_all(runs, PAGES)
    found = problems(PAGES, hand_written())
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
