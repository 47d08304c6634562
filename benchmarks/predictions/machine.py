"""Memory and step times of real ranks on this machine, also over slow links (`--link`), against predictions."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.predictions.held import Held, finish
from ddp_lab.planner.choices import choices
from ddp_lab.planner.contracts import CollectiveCosts, Costs, OperatorCosts, Setting
from ddp_lab.planner.costs import hardware, record
from ddp_lab.planner.costs.links import FittedCosts, LinkCosts
from ddp_lab.planner.runs import first_micro_batches, module_maker
from ddp_lab.planner.simulation.simulate import simulate
from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.link_model import LinkModel

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, dict[str, Any]] = {
    "sample": {"workload": "sample"},
    "mlp": {"workload": "mlp", "depth": 6, "width": 256},
    "mlp-wide": {"workload": "mlp", "depth": 8, "width": 1024},
}
HERE = "loopback"
STATES = ("parameters", "gradients", "optimizer_state", "buffers")
MIB = 2**20


def run(options: argparse.Namespace) -> None:
    """Measure, predict and print.

    Raises:
        UserError: the command line makes no sense, or something cannot be measured or predicted.
    """
    wanted = choices(options.choices.split(",") if options.choices else None)
    names, rows, ranks = [name for name in wanted if not name.startswith("deepspeed")], [], options.ranks
    with tempfile.TemporaryDirectory() as temporary:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        path = Path(temporary) / "measured.json"
        for link in options.links.split(","):
            collectives = measured_collectives(Path(temporary), ranks, link, start) if options.rounds else None
            for model in options.models.split(","):
                config = replace(config_of(model, ranks, options.grad_accum_steps), link=link)
                arguments = [str(path), ",".join(names), str(options.rounds), json.dumps(config.as_dict())]
                complete([*start, str(ROOT / "benchmarks" / "predictions" / "ranks.py"), *arguments])
                found = json.loads(path.read_text())
                rows += compare(f"{model}, {ranks} ranks, {link}", config, found, collectives)
    finish(rows, options.csv)


def config_of(model: str, ranks: int, grad_accum_steps: int) -> RunConfig:
    """The settings of a model.

    Raises:
        UserError: there is none of this name, or the batch does not divide.
    """
    if model not in MODELS:
        raise UserError(f"--models: {unknown_name('model', model, MODELS)}")
    more = {"global_batch_size": 8, "grad_accum_steps": grad_accum_steps, "train_samples": 16, "eval_samples": 4}
    config = RunConfig.of(**MODELS[model], **more, device="cpu", backend="gloo")
    config.micro_batch_size(ranks)
    return config


def measured_collectives(folder: Path, ranks: int, link: str, start: Sequence[str]) -> FittedCosts:
    """Costs by `benchmarks/collectives.py`, measured as in training: a link has no time to rest between two calls, and
    caches hold no gradients."""
    path = folder / "reports" / "collectives" / f"gloo_cpu_{ranks}_ranks.csv"
    flags = "--collectives all_reduce,all_gather,broadcast,reduce_scatter --sizes 4K,16K,64K,256K,1M,2M,4M,8M,16M"
    flags += f" --in-a-row 5 --spread 64M --seconds-per-size 0.5 --link {link} --output-dir {folder}"
    complete([*start, str(ROOT / "benchmarks" / "collectives.py"), *flags.split()])
    by_kind = pd.read_csv(path).groupby("collective")
    models = {str(kind): LinkModel.fit(rows["size_bytes"], rows["p50_us"] * 1e-6) for kind, rows in by_kind}
    return FittedCosts(models, "gloo", ranks, "as measured")


def complete(command: Sequence[str]) -> None:
    """Run a measurement to its end.

    Raises:
        UserError: it failed.
    """
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        said = next((line for line in answer.stderr.splitlines() if "rror: " in line), answer.stderr[-300:])
        raise UserError(f"the ranks failed: {said}")


def longest_rank(config: RunConfig, ranks: int) -> int:
    """The rank whose samples have most elements. The others wait for it."""

    def elements(rank: int) -> int:
        return sum(tensor.numel() for batch in first_micro_batches(config, ranks, rank) for tensor in batch.values())

    return max(range(ranks), key=elements)


def compare(
    where: str, config: RunConfig, measured: Mapping[str, Any], collectives: CollectiveCosts | None = None
) -> list[Held]:
    """What the rank with the longest samples holds, and how long its step takes if that was measured.

    Args:
        measured: What `ranks.py` wrote.
        collectives: Default: by the table of links.
    """
    (ranks,) = {len(row["memory"]) for row in measured["choices"].values()}
    cluster, rank = hardware.cluster(f"{ranks}xcpu", HERE), longest_rank(config, ranks)
    batches = first_micro_batches(config, ranks, rank)
    batch_bytes = sum(tensor.untyped_storage().nbytes() for batch in batches for tensor in batch.values())
    operators: OperatorCosts = cluster.device
    if measured["record"]:
        operators = record.operator_costs("record", measured["record"], cluster.device, "fp32")
    rows: list[Held] = []
    costs = Costs(operators, collectives or LinkCosts(cluster))
    for name, row in measured["choices"].items():
        one = Setting(replace(config, choice=name), module_maker(config), lambda: [dict(batch) for batch in batches])
        found = simulate(one, cluster, costs, rank)
        held = row["memory"][rank]
        resting = sum(found.memory.at_rest.get(state, 0) for state in STATES) / MIB
        peak = (found.memory.peak_bytes - batch_bytes) / MIB  # the batch is in no measured peak
        real = sum(held[f"{state}_bytes"] for state in STATES) / MIB
        rows.append((where, name, "at rest", "MiB", resting, real))
        rows.append((where, name, "peak", "MiB", peak, held["peak_bytes"] / MIB))
        if "step_ms" in row:
            rows.append((where, name, "step", "ms", found.step_time_s * 1e3, row["step_ms"]))
    return rows
