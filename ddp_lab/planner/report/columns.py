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
    "fits": Column("fits", "", "yes, no, or unknown where the choice cannot be simulated"),
    "step_time_ms": Column("step", "ms", "duration of an optimizer step"),
    "step_time_low_ms": Column("from", "ms", "lower end of the interval in which it should lie"),
    "step_time_high_ms": Column("to", "ms", "upper end of the same"),
    "samples_per_second": Column("throughput", "samples/s", "samples of the global batch over the step's duration"),
    "tokens_per_second": Column(
        "throughput", "tokens/s", "the same in tokens, padding included; none for images", 1, 0
    ),
    "exposed_ms": Column("exposed", "ms", "time of a step in which a rank only waits for communication"),
    "exposed_pct": Column("exposed", "%", "the same as share of the step"),
    "cost_per_million_samples": Column(
        "cost", "a million samples", "of all devices, at --price; none without it", 1, 2
    ),
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
SHOWN = tuple(name for name in PLAN_COLUMNS if name not in ("entrypoint", "resting_bytes", "exposed_pct", "note"))
"""What the terminal shows of them."""
