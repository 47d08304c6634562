"""The columns of a plan's table: label, unit, meaning. CSV, terminal, page and `docs/command-line.md` follow them."""

from ddp_lab.analysis.columns import Column
from ddp_lab.planner.contracts import COMPONENTS

GIB = 1 / 2**30


def gib(label: str, meaning: str) -> Column:
    return Column(label, "GiB", meaning, GIB, 2)


PLAN_COLUMNS = {
    "choice": Column("choice", "", "strategy"),
    "mesh": Column("mesh", "", "ranks by dimension, as --mesh takes them; none without it"),
    "entrypoint": Column("entrypoint", "", "script that trains with it"),
    "micro_batch_size": Column("micro", "batch", "samples in a micro-batch of a rank", 1, 0),
    "grad_accum_steps": Column("accu-", "mulate", "micro-batches of a rank in a step", 1, 0),
    "activation_checkpointing": Column("recompute", "", "what is computed again in backward"),
    "compile": Column("compile", "", "whether the model's blocks are compiled"),
    "fits": Column("fits", "", "yes, no, or unknown where the choice cannot be simulated"),
    "step_time_ms": Column("step", "ms", "duration of an optimizer step"),
    "step_time_low_ms": Column("from", "ms", "lower end of the interval in which it should lie"),
    "step_time_high_ms": Column("to", "ms", "upper end of the same"),
    "samples_per_second": Column("throughput", "samples/s", "samples of the global batch over the step's duration"),
    "tokens_per_second": Column("throughput", "tokens/s", "the same in tokens, padding included", 1, 0),
    "tokens_per_second_per_device": Column("throughput", "tokens/s/GPU", "the same, over the number of devices", 1, 0),
    "mfu_pct": Column("MFU", "%", "FLOPs of forward and backward, as share of the devices' peak; none without a peak"),
    "exposed_ms": Column("exposed", "ms", "time of a step in which a rank only waits for communication"),
    "exposed_pct": Column("exposed", "%", "the same as share of the step"),
    "cost_per_million_samples": Column("1e6 samples", "$", "of all devices, where samples are images", 1, 2),
    "cost_per_billion_tokens": Column("1e9 tokens", "$", "of all devices; none without a price", 1, 2),
    "training_hours": Column("in all", "hours", "time that --tokens take, where the choice fits; none without it"),
    "training_cost": Column("in all", "$", "what all devices cost in that time", 1, 0),
    "spare_bytes": gib(
        "to spare", "memory of a device, less what CUDA itself takes where it is a GPU, less the peak; below 0: missing"
    ),
    "peak_bytes": gib("peak", "most bytes that a rank's tensors take at one moment of a step"),
    **{
        f"peak_{component}_bytes": gib(label, f"of these, {label}{' buffers' * (component == 'communication')}")
        for component, label in COMPONENTS.items()
    },
    "resting_bytes": gib("at rest", "bytes that a rank's tensors take between two steps"),
    "note": Column("note", "", "why a choice cannot be simulated, or what no cost is known of"),
}
SHOWN = (
    *("choice", "mesh", "micro_batch_size", "grad_accum_steps", "activation_checkpointing", "compile", "fits"),
    *("tokens_per_second_per_device", "cost_per_billion_tokens", "training_hours", "training_cost"),
    *("spare_bytes", "step_time_ms", "mfu_pct", "cost_per_million_samples", "peak_bytes", "exposed_ms"),
    "samples_per_second",
)
"""What the terminal shows of them, as many as `WIDTH` has room for, the first of these first."""
WIDTH = 100
"""Characters of a table on the terminal."""
