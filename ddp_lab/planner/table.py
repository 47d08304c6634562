"""The table of a plan, a row for each outcome: on the terminal, and in the CSV that `docs/command-line.md` explains;
and the command that runs a case."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pandas as pd
from rich.table import Table

from ddp_lab.analysis.columns import CsvColumn, as_table
from ddp_lab.analysis.metrics.utilization import dtype_of
from ddp_lab.planner.contracts import COMPONENTS, Costs, Simulated
from ddp_lab.planner.costs.links import LINK_ERROR
from ddp_lab.planner.model import IMAGES, SAMPLES
from ddp_lab.planner.outcome import CaseOutcome
from ddp_lab.planner.rates import flops_of_a_sample
from ddp_lab.planner.space import Case
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.workloads import BUILT_IN_LANGUAGE
from ddp_lab.runtime.settings.data import CAUSAL_LM
from ddp_lab.runtime.settings.field import flag_name

GIB = 1 / 2**30
HOUR_S = 3600
ALWAYS = ("choice", "task", "model", "global_batch_size", "grad_accum_steps", "precision")
"""Settings that the command of a run names though they are the runner's defaults."""


def gib(label: str, meaning: str) -> CsvColumn:
    return CsvColumn(label, "GiB", meaning, GIB, 2)


PLAN_COLUMNS = {
    "gpus": CsvColumn("devices", "", "as in --gpus, if it names several"),
    "choice": CsvColumn("strategy", "", "strategy"),
    "mesh": CsvColumn("mesh", "", "ranks by dimension, as in --mesh; none without it"),
    "entrypoint": CsvColumn("entrypoint", "", "script that trains with the strategy"),
    "micro_batch_size": CsvColumn("micro", "batch", "samples in a micro-batch of a rank", 1, 0),
    "grad_accum_steps": CsvColumn("accu-", "mulate", "micro-batches of a rank in a step", 1, 0),
    "activation_checkpointing": CsvColumn("recompute", "", "what is recomputed in backward"),
    "compile": CsvColumn("compile", "", "whether the model's blocks are compiled"),
    "fits": CsvColumn("fits", "", "yes, no, or unknown if the strategy cannot be simulated"),
    "step_time_ms": CsvColumn("step", "ms", "duration of an optimizer step"),
    "step_time_low_ms": CsvColumn("from", "ms", "lower end of the interval in which it should lie"),
    "step_time_high_ms": CsvColumn("to", "ms", "upper end of the same"),
    "samples_per_second": CsvColumn("throughput", "samples/s", "samples of the global batch over the step's duration"),
    "tokens_per_second": CsvColumn("throughput", "tokens/s", "the same in tokens, padding included", 1, 0),
    "tokens_per_second_per_device": CsvColumn(
        "throughput", "tokens/s/GPU", "the same, over the number of devices", 1, 0
    ),
    "mfu_pct": CsvColumn(
        "MFU", "%", "FLOPs of forward and backward, as share of the devices' peak; none without a peak"
    ),
    "exposed_ms": CsvColumn("exposed", "ms", "time of a step in which a rank only waits for communication"),
    "exposed_pct": CsvColumn("exposed", "%", "the same as share of the step"),
    "cost_per_million_samples": CsvColumn("1e6 samples", "$", "of all devices, where samples are images", 1, 2),
    "cost_per_billion_tokens": CsvColumn("cost/1e9 tokens", "$", "of all devices; none without a price", 1, 2),
    "training_hours": CsvColumn("in all", "hours", "time that --tokens take, if the strategy fits; none without it"),
    "training_cost": CsvColumn("in all", "$", "cost of all devices in that time", 1, 0),
    "spare_bytes": gib(
        "to spare",
        "memory of a device minus the peak, and on a GPU minus CUDA's and NCCL's; below 0: missing",
    ),
    "peak_bytes": gib("peak", "most bytes of a rank's tensors at one moment of a step"),
    **{
        f"peak_{component}_bytes": gib(label, f"of these, {label}{' buffers' * (component == 'communication')}")
        for component, label in COMPONENTS.items()
    },
    "resting_bytes": gib("at rest", "bytes of a rank's tensors between two steps"),
    "note": CsvColumn("note", "", "why a strategy cannot be simulated, or operators without a known cost"),
}
SHOWN = (
    *("gpus", "choice", "mesh", "micro_batch_size", "grad_accum_steps", "activation_checkpointing", "compile", "fits"),
    *("tokens_per_second_per_device", "cost_per_billion_tokens", "training_hours", "training_cost"),
    *("spare_bytes", "step_time_ms", "mfu_pct", "cost_per_million_samples", "peak_bytes", "exposed_ms"),
    "samples_per_second",
)
"""What the terminal shows of them, as many as `WIDTH` has room for, the first of these first."""
WIDTH = 100
"""Characters of a table on the terminal."""
SAME = ("micro_batch_size", "grad_accum_steps", "activation_checkpointing", "compile")
"""Columns that are left out where all rows have the same."""
TEXTS = ("gpus", "choice", "mesh", "activation_checkpointing", "compile", "fits")


def interval(simulated: Simulated, costs: Costs) -> tuple[float, float]:
    """Bounds in seconds of the step time, if operators are off by no more than `compute_error` and collectives by no
    more than `LINK_ERROR`.

    A step is a longest chain of operators and collectives. If all of them grow by one factor, so does the step. If only
    operators grow, or only collectives, it grows by no more than all of them. So it is off by the smaller error's share
    of itself, and the difference of both errors' share of all compute, or of all communication.
    """
    compute, link, step = costs.compute_error, LINK_ERROR, simulated.step_time_s
    wider = simulated.communication_s if link > compute else simulated.compute_s
    half = min(compute, link) * step + abs(link - compute) * min(wider, step)
    return step - half, step + half


def row(outcome: CaseOutcome, flops: float | None = None) -> dict[str, Any]:
    """What the table says of it; columns as `PLAN_COLUMNS` explains them. `flops`: what a sample takes
    (`rates.flops_of_a_sample`)."""
    case, simulated = outcome.case, outcome.simulated
    values: dict[str, Any] = {
        "choice": case.config.choice,
        **({"mesh": case.config.mesh} if case.mesh else {}),
        "entrypoint": case.entrypoint,
        "micro_batch_size": case.micro_batch_size,
        "grad_accum_steps": case.config.grad_accum_steps,
        "activation_checkpointing": case.level,
        "compile": "yes" if case.config.strategy.compile else "no",
    }
    if simulated is None:
        return {**values, "fits": "unknown", "note": outcome.reason}
    low, high = interval(simulated, case.costs)
    values |= {
        "fits": "yes" if outcome.fits() else "no",
        "spare_bytes": outcome.spare_bytes,
        "peak_bytes": outcome.peak_bytes,
        **{f"peak_{component}_bytes": nbytes for component, nbytes in simulated.memory.at_peak.items()},
        "resting_bytes": sum(simulated.memory.at_rest.values()),
        "step_time_ms": outcome.step_s * 1e3,
        "step_time_low_ms": low * 1e3,
        "step_time_high_ms": high * 1e3,
        "exposed_ms": simulated.exposed_s * 1e3,
        "exposed_pct": 100 * simulated.exposed_s / outcome.step_s,
        "note": note(simulated),
    }
    return values | rates(case if outcome.fits() else replace(case, tokens=None), outcome.step_s, flops)


def note(simulated: Simulated) -> str:
    unknown = ", ".join(f"{name} ({count}x)" for name, count in simulated.without_costs.items())
    notes = [f"no cost known, taken as 0: {unknown}"] * bool(unknown)
    largest = simulated.largest
    return "; ".join([*notes, *[f"rank {largest} of the pipeline holds most"] * (largest is not None)])


def rates(case: Case, step_s: float, flops: float | None) -> dict[str, float]:
    """What a step of so many seconds means in samples, tokens, use of the devices, and money."""
    devices, samples = case.cluster.world_size, case.config.global_batch_size / step_s
    figures = {"samples_per_second": samples}
    a_second = None if case.price is None else case.price.amount * devices / HOUR_S
    tf32 = {"tf32": case.model.kind != "tokens"}  # as torch computes convolutions by default
    device = case.cluster.device
    peak = device.peak.get(dtype_of(case.config.as_dict() | tf32)) if device.kind == "cuda" else None
    if flops and peak:
        figures["mfu_pct"] = 100 * flops * samples / (peak * devices)
    if case.model.kind != "tokens":
        return figures | ({} if a_second is None else {"cost_per_million_samples": a_second / samples * 1e6})
    tokens = samples * case.sequence_length
    figures |= {"tokens_per_second": tokens, "tokens_per_second_per_device": tokens / devices}
    if a_second is not None:
        figures["cost_per_billion_tokens"] = a_second / tokens * 1e9
    if case.tokens is not None:
        figures["training_hours"] = case.tokens / tokens / HOUR_S
        if a_second is not None:
            figures["training_cost"] = case.tokens / tokens * a_second
    return figures


def framed(outcomes: Sequence[CaseOutcome]) -> pd.DataFrame:
    """The table, with those of `PLAN_COLUMNS` that have any value."""
    case = outcomes[0].case
    flops = flops_of_a_sample(case.model, case.sequence_length)
    frame = pd.DataFrame([row(outcome, flops) for outcome in outcomes])
    return frame[[name for name in PLAN_COLUMNS if name in frame]]


def printed(frame: pd.DataFrame) -> Table:
    """The table as the terminal shows it: of the columns `SHOWN`, in order of importance, those that `WIDTH` has room
    for."""
    without = {name for name in SAME if frame[name].nunique() <= 1}
    without |= {"samples_per_second"} if "tokens_per_second" in frame else set()
    cells: Mapping[str, list[str]] = {
        name: [column.label, column.unit, *map(column.show, frame[name])]
        for name in SHOWN
        if name in frame and name not in without
        for column in (PLAN_COLUMNS[name],)
    }
    widths = accumulate(max(map(len, texts)) + 2 for texts in cells.values())
    shown = [name for name, width in zip(cells, widths, strict=True) if width <= WIDTH + 2]
    table = as_table(frame, {name: column for name, column in PLAN_COLUMNS.items() if name in shown}, TEXTS)
    table.padding = (0, 2, 0, 0)
    return table


def runner_command(case: Case) -> str:
    """Starts all ranks of one node. `HOST`, `MODEL` and `DATASET` are left to the reader: the address of the first
    node, a model that has no name, and what it is trained on."""
    cluster, model = case.cluster, case.model
    tokens = case.sequence_length if model.task == CAUSAL_LM else None
    name = "MODEL" if " " in model.name or model.kind == IMAGES else model.name
    is_workload = name in BUILT_IN_LANGUAGE or model.kind == SAMPLES
    named = {"workload": name} if is_workload else {"model": name}
    if tokens and not is_workload:
        named["dataset"] = "DATASET"
    config = case.config.but(task=model.task, sequence_length=tokens, **named)
    several = [f"--nnodes={cluster.nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    words = ["torchrun", *(several if cluster.nodes > 1 else ["--standalone"])]
    words += [f"--nproc_per_node={cluster.ranks_per_node}", case.entrypoint]
    plain = RunConfig().as_dict()
    for setting, value in config.as_dict().items():
        if value != plain[setting] or (setting in ALWAYS and value is not None):
            words += [flag_name(setting), *[str(value)] * (value is not True)]
    return "uv run " + shlex.join(words)
