"""Bytes at rest and at the peak of a step, of every choice, against real ranks."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.cli import unknown_name
from training.errors import UserError

if TYPE_CHECKING:
    from benchmarks.predictions.held import Held
    from training.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 900
MODELS: dict[str, dict[str, Any]] = {
    "sample": {"workload": "sample", "train_samples": 16, "eval_samples": 4},
    "mlp": {"workload": "mlp", "depth": 6, "width": 256, "train_samples": 16, "eval_samples": 4},
    "mlp-wide": {"workload": "mlp", "depth": 8, "width": 1024, "train_samples": 16, "eval_samples": 4},
    "transformer-small": {"workload": "transformer-small", "train_samples": 16, "eval_samples": 4},
}
"""What each name stands for; small enough for a machine of a few GB."""
MIB = 2**20
STATES = ("parameters", "gradients", "optimizer_state", "buffers")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="sample,mlp", help=f"with commas between, of {', '.join(MODELS)}")
    parser.add_argument("--choices", help="only these strategies, with commas between (default: all but DeepSpeed's)")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--global-batch-size", type=int, default=8, help="samples in an optimizer step (default: 8)")
    parser.add_argument("--grad-accum-steps", type=int, default=2, help="micro-batches of a rank (default: 2)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")


def run(options: argparse.Namespace) -> None:
    """Measure, predict and print.

    Raises:
        UserError: the command line makes no sense, or the ranks failed.
    """
    from benchmarks.predictions.held import Held, show, write
    from planner.plan import choices
    from training.config import RunConfig

    names = options.choices.split(",") if options.choices else None
    wanted = [name for name in choices(names) if not name.startswith("deepspeed")]
    rows: list[Held] = []
    for model in options.models.split(","):
        if model not in MODELS:
            raise UserError(f"--models: {unknown_name('model', model, MODELS)}")
        batch = {"global_batch_size": options.global_batch_size, "grad_accum_steps": options.grad_accum_steps}
        config = RunConfig(**MODELS[model], **batch, device="cpu", backend="gloo")
        config.micro_batch_size(options.ranks)
        measured = measure(config, wanted, options.ranks)
        for choice in wanted:
            rows += compare(model, config, choice, measured[choice])
    at_rest = [row for row in rows if row.what == "at rest"]
    peaks = [row for row in rows if row.what == "peak"]
    show(at_rest, f"at rest, {options.ranks} ranks over Gloo", 0)
    show(peaks, "\npeak of a step", 2, 0.5)
    write(rows, options.csv)


def measure(config: "RunConfig", choices: Sequence[str], ranks: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of memory of each choice, a row a rank.

    Raises:
        UserError: a rank failed.
    """
    import dataclasses

    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        script = str(ROOT / "benchmarks" / "predictions" / "memory_ranks.py")
        command = [*launcher, script, str(path), ",".join(choices), json.dumps(settings)]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise UserError(f"{config.workload}: {ranks} ranks were not done after {TIMEOUT_S} s") from None
        if answer.returncode:
            last = next((line for line in answer.stderr.splitlines() if "Error: " in line), "a rank was killed")
            raise UserError(f"{config.workload}: {last}")
        return json.loads(path.read_text())


def compare(model: str, config: "RunConfig", choice: str, measured: Sequence[dict[str, Any]]) -> list["Held"]:
    """Both figures of the rank that holds most at its peak."""
    from dataclasses import replace

    from benchmarks.predictions.held import Held
    from planner import hardware
    from planner.collective_costs import from_links
    from planner.costs import roofline
    from planner.runs import first_micro_batches, setting
    from planner.simulate import simulate

    cluster = hardware.cluster(f"{len(measured)}xcpu", "loopback")
    most = max(measured, key=lambda row: row["peak_bytes"])
    batches = first_micro_batches(config, len(measured), most["rank"])
    asked = setting(replace(config, choice=choice), len(measured), batches)
    memory = simulate(asked, cluster, roofline(cluster.device), from_links(cluster), rank=most["rank"]).memory
    resting = sum(memory.at_rest.get(state, 0) for state in STATES)
    held = sum(most[f"{state}_bytes"] for state in STATES)
    # The record begins with what components hold, without the batch, which lies there all the time.
    batch = sum(tensor.untyped_storage().nbytes() for one in batches for tensor in one.values())
    return [
        Held(model, choice, "at rest", "MiB", resting / MIB, held / MIB),
        Held(model, choice, "peak", "MiB", (memory.peak_bytes - batch) / MIB, most["peak_bytes"] / MIB),
    ]
