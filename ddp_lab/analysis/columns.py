"""The columns of the CSV files: label, unit, format and meaning. Pages and `docs/csv-columns.md` use the same texts."""

from dataclasses import dataclass, replace

import pandas as pd

from ddp_lab.collectives.kinds import LABELS


@dataclass(frozen=True)
class Column:
    """How a column is shown: `scale` converts the CSV's value to `unit`; `digits` follow the decimal point."""

    label: str
    unit: str
    meaning: str
    scale: float = 1.0
    digits: int = 1

    def show(self, value: object) -> str:
        """The value as a person reads it, without its unit; a dash if there is none."""
        if value is None or value is pd.NA or value != value:  # NaN
            return "–"
        if isinstance(value, str) or self.unit == "":
            return f"{value:g}" if isinstance(value, float) else str(value)
        return f"{float(value) * self.scale:,.{self.digits}f}"  # type: ignore[arg-type]


SCHEMA_VERSION = 11
"""One version for all CSV files. It goes up when a column is added, removed, moved, or changes its meaning or unit."""


class PValue(Column):
    """A probability. One that is too small for its digits is shown as below the last digit."""

    def show(self, value: object) -> str:
        if not isinstance(value, float) or value != value:
            return super().show(value)
        least = 10.0**-self.digits
        return f"<{least:.{self.digits}f}" if value < least else f"{value:.{self.digits}f}"


MIB = 1 / 2**20
COMPONENTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer states",
    "buffers": "buffers",
}
"""Parts of model states: name in run records, and in words."""
SHARDABLE = ("parameters", "gradients", "optimizer_state")


def mib(label: str, meaning: str) -> Column:
    return Column(label, "MiB", meaning, MIB)


TIME_COLUMNS = {
    "rank": Column("rank", "", "rank of the process"),
    "world_size": Column("world size", "", "ranks in the run"),
    "trace_kind": Column("trace", "", "cpu: operators and Gloo spans, lowered; cuda: device kernels"),
    "steps": Column("steps", "", "profiled optimizer steps that were analysed"),
    "profiled_step_ms": Column("step", "ms", "mean duration of an analysed step, which the profiler slows down"),
    "compute_ms": Column("compute", "ms", "time per step in which compute ran (HTA temporal breakdown)"),
    "non_compute_ms": Column("exposed", "ms", "time per step in which only communication (CUDA: or a copy) ran (HTA)"),
    "idle_ms": Column("idle", "ms", "time per step in which nothing ran (HTA)"),
    "compute_pct": Column("compute", "%", "compute_ms as share of the time from the first kernel to the last"),
    "non_compute_pct": Column("exposed", "%", "non_compute_ms as share of the same time"),
    "idle_pct": Column("idle", "%", "idle_ms as share of the same time"),
    "overlap_pct": Column("overlap", "%", "share of communication time in which compute ran as well (HTA)"),
    "collective_calls_per_step": Column("collectives", "calls/step", "collectives that the rank took part in"),
    "collective_bytes_per_step": Column("payload", "MiB/step", "their payload in bytes, as nccl-tests counts", MIB, 3),
    "collective_sent_bytes_per_step": Column("sent", "MiB/step", "bytes that a rank sends for them", MIB, 3),
}

KIND_COLUMNS = {
    column: shown
    for kind in LABELS
    for column, shown in (
        (f"{kind}_calls_per_step", Column("calls", "calls/step", "calls of this kind")),
        (f"{kind}_bytes_per_step", Column("payload", "MiB/step", "their payload in bytes", MIB, 3)),
        (f"{kind}_ms_per_step", Column("total time", "ms/step", "sum of their durations, hidden or not", 1, 2)),
    )
}

MEMORY_COLUMNS = {
    **{
        f"{component}_bytes": mib(f"{label}, at rest", f"storage of {label} after an optimizer step")
        for component, label in COMPONENTS.items()
    },
    "model_states_bytes": mib("states, at rest", "these four together"),
    **{
        f"expected_{name}_bytes": mib(f"{COMPONENTS[name]}, formula", f"{COMPONENTS[name]} by the formula")
        for name in SHARDABLE
    },
    "expected_model_states_bytes": mib("states, formula", "these three together"),
    **{
        f"peak_{component}_bytes": mib(f"{label}, peak", f"most storage of {label} in the recorded step")
        for component, label in COMPONENTS.items()
    },
    "peak_model_states_bytes": mib("states, peak", "most of these four together at one moment"),
    "peak_bytes": mib("allocated, peak", "most bytes of tensors at one moment, activations and temporaries with them"),
    "peak_phase": Column("peak in", "", "part of the step in which the peak is"),
    "peak_workspace_bytes": mib(
        "workspaces, peak", "most bytes of operators' workspaces, on a CPU; depends on the processor"
    ),
    "peak_rss_bytes": mib("RSS, peak", "largest resident set of the process, in bytes"),
}

SUMMARY_COLUMNS = {**TIME_COLUMNS, **KIND_COLUMNS, **MEMORY_COLUMNS}

EXPOSURE_COLUMNS = {
    "rank": Column("rank", "", "rank of the process"),
    "step": Column("step", "", "number of the optimizer step, from 0"),
    "step_ms": Column("step", "ms", "duration of the step under the profiler; the next four columns add up to it"),
    "compute_ms": Column("compute", "ms", "time in which compute ran"),
    "exposed_ms": Column("exposed", "ms", "a collective ran, and no compute; the last two columns add up to it"),
    "exposed_copy_ms": Column("copies", "ms", "a memory copy ran, and neither compute nor a collective"),
    "idle_ms": Column("idle", "ms", "nothing ran"),
    "exposed_wait_ms": Column(
        "waiting", "ms", "exposed, before the collective's last rank or the pipeline's message arrived"
    ),
    "exposed_transfer_ms": Column("transfer", "ms", "exposed after all ranks arrived, or if the last rank is unknown"),
}

COLLECTIVE_COLUMNS = {
    "rank": Column("rank", "", "rank of the process"),
    "step": Column("step", "", "optimizer step in which the collective was issued"),
    "group": Column("group", "", "process group: its ranks and its purpose, or all ranks; empty if unknown"),
    "dimension": Column(
        "dimension", "", "dimension of the mesh that its ranks span; empty without a mesh, or if unknown"
    ),
    "sequence": Column("place", "", "place among the group's collectives that the rank issued in the step, from 0"),
    "kind": Column("collective", "", "kind of collective"),
    "made_of": Column("as", "", "the calls that make it over Gloo, one from each rank; empty for a single call"),
    "bytes": Column("payload", "MiB", "payload in bytes, by nccl-tests' definition of size", MIB, 3),
    "sent_bytes": Column("sent", "MiB", "bytes of it that a rank sends, mean over the group", MIB, 3),
    "after_backward_ms": Column("start", "ms", "start, relative to the end of the step's last backward pass", 1, 2),
    "duration_ms": Column("duration", "ms", "from start to end on this rank", 1, 2),
    "wait_ms": Column("wait", "ms", "from start to the arrival of the last rank", 1, 2),
    "transfer_ms": Column("transfer", "ms", "from the arrival of the last rank to the end on this rank", 1, 2),
    "exposed_ms": Column("exposed", "ms", "time without compute that counts for this collective", 1, 2),
    "exposed_wait_ms": Column("exposed wait", "ms", "the part of exposed_ms before the last rank arrived", 1, 2),
    "late_rank": Column("last", "", "rank that arrived last"),
    "lateness_ms": Column("lateness", "ms", "how much later the last rank arrived than the median of the others", 1, 2),
    "done_after_ms": Column("moving", "ms", "from the last rank's arrival to the last rank's end", 1, 2),
    "algbw_gbps": Column("algbw", "GB/s", "payload over done_after_ms; empty if a rank was done before it", 1, 3),
    "busbw_gbps": Column("busbw", "GB/s", "algbw times nccl-tests' factor for the kind and the number of ranks", 1, 3),
    "stream": Column("stream", "", "stream of the device, or thread of Gloo, that ran it, or the first part of it"),
    "compute_starts": Column(
        "begun", "", "kernels of compute (CPU: operators) that began while it ran; 0 if all waited"
    ),
}

DIMENSION_COLUMNS = {
    "rank": EXPOSURE_COLUMNS["rank"],
    "step": EXPOSURE_COLUMNS["step"],
    "dimension": Column("dimension", "", "dimension of the mesh; mesh: all ranks; empty: another group"),
    "calls": Column("calls", "calls/step", "collectives that the rank issued in the step"),
    "bytes": Column("payload", "MiB/step", "their payload in bytes, by nccl-tests' definition of size", MIB, 3),
    "total_ms": Column("total", "ms/step", "sum of their durations, hidden or not", 1, 2),
    "running_ms": Column("running", "ms/step", "time of the step in which at least one ran", 1, 2),
    "exposed_while_ms": Column(
        "exposed while running",
        "ms/step",
        "the part of running_ms without compute; may count for other dimensions too",
        1,
        2,
    ),
    "exposed_ms": Column(
        "exposed",
        "ms/step",
        "exposed time of the dimension: its collective was issued first, or a rank waited for its message",
        1,
        2,
    ),
    "exposed_wait_ms": Column("exposed wait", "ms/step", "the part of exposed_ms before the last rank arrived", 1, 2),
}

PIPELINE_COLUMNS = {
    "rank": EXPOSURE_COLUMNS["rank"],
    "step": EXPOSURE_COLUMNS["step"],
    "step_ms": Column("step", "ms", "duration of the step under the profiler"),
    "pipeline_ms": Column("pipeline", "ms", "from the start of the first pass to the end of the last, on any rank"),
    "forward_ms": Column("forward", "ms", "forward passes"),
    "backward_ms": Column("backward", "ms", "undivided backward passes"),
    "backward_input_ms": Column("of inputs", "ms", "backward passes of inputs only"),
    "backward_weight_ms": Column("of weights", "ms", "backward passes of weights"),
    "bubble_ms": Column("bubble", "ms", "pipeline_ms without passes; includes the next three columns"),
    "wait_activation_ms": Column("activations", "ms", "waiting for activations"),
    "wait_gradient_ms": Column("gradients", "ms", "waiting for gradients"),
    "send_ms": Column("sending", "ms", "host time to post messages; 0 on a device, where they overlap"),
    "wait_activation_from": Column("from", "", "rank whose activations it waited for"),
    "wait_gradient_from": Column("from", "", "rank whose gradients it waited for"),
    "bubble_pct": Column("bubble", "%", "bubble_ms as share of pipeline_ms"),
    "ideal_bubble_pct": Column("equal stages", "%", "bubble_pct by the formula, for equal stages and instant messages"),
}

STRAGGLER_COLUMNS = {
    "rank": EXPOSURE_COLUMNS["rank"],
    "step": EXPOSURE_COLUMNS["step"],
    "collectives": Column("collectives", "", "collectives of the rank in the step that could be matched over ranks"),
    "last": Column("last", "", "how many of these it reached last"),
    "lateness_ms": Column("lateness", "ms", "largest lateness in these, after the median of the other ranks"),
    "costs_ms": Column("costs", "ms", "in these, exposed waiting of all other ranks", 1, 2),
}

BUCKET_COLUMNS = {
    "group": COLLECTIVE_COLUMNS["group"],
    "place": Column("place", "", "place among the group's collectives in the step; of several calls, the first"),
    "kind": COLLECTIVE_COLUMNS["kind"],
    "bytes": Column("payload", "MiB/call", "payload of a call in bytes, by nccl-tests' definition of size", MIB, 3),
    "calls_per_step": Column("calls", "calls/step", "calls in one optimizer step"),
    "after_backward_ms": Column("start", "ms", "median start, relative to the end of the step's last backward", 1, 2),
    "duration_ms": Column("duration", "ms/call", "median time from start to end on a rank", 1, 2),
    "total_ms_per_step": Column("total", "ms/step", "sum of durations in one optimizer step, hidden or not", 1, 2),
    "exposed_ms_per_step": Column("exposed", "ms/step", "time without compute that counts for these calls", 1, 2),
    "busbw_gbps": Column("busbw", "GB/s", "median bus bandwidth", 1, 3),
}

AUDIT_COLUMNS = {
    "subject": Column("check", "", "what is checked"),
    "rank": Column("rank", "", "the rank; empty for a figure of the whole run"),
    "unit": Column("unit", "", "unit of the row's figures"),
    "expected": Column("expected", "", "by the strategy's formula or the run's configuration"),
    "measured": Column("measured", "", "from trace or record; of several steps, the value furthest from expected"),
    "difference": Column("difference", "", "measured minus expected"),
    "tolerance": Column("tolerance", "", "the largest difference that passes"),
    "steps": Column("steps", "", "analysed steps with a whole global batch, which were compared; else empty"),
    "result": Column("result", "", "pass, fail, or unknown if the trace does not say"),
}

OF_WORST_RANK = "on the rank with most"
OF_STEPS = "mean over ranks and analysed steps"
TIME_PARTS = ("compute_ms", "exposed_wait_ms", "exposed_transfer_ms", "exposed_copy_ms", "idle_ms")
CHOICE = {"choice": Column("strategy", "", "strategy")}
SPEED_COLUMNS = {
    "step_time_ms_median": Column("step time", "ms", "median wall time of an optimizer step, batch loading included"),
    "step_time_ms_p25": Column("p25", "ms", "a quarter of the timed steps took at most this"),
    "step_time_ms_p75": Column("p75", "ms", "three quarters of the timed steps took at most this"),
    "step_time_ratio": Column("ratio", "×", "median step time divided by the reference's", 1, 2),
    "step_time_ratio_by_pass": Column("by pass", "×", "the ratio in each pass of a sweep, the median over steps"),
    "paired_ratio": Column("by run", "×", "step time over the reference's in the same pass, mean over passes", 1, 3),
    "paired_ratio_low": Column("from", "×", "lower end of its 95 % interval", 1, 3),
    "paired_ratio_high": Column("to", "×", "upper end of its 95 % interval", 1, 3),
    "paired_p_value": PValue(
        "p", "", "p-value of no difference: moderated t-test with the run as unit, corrected by Holm", 1, 4
    ),
    "passes": Column("passes", "", "runs that were compared with a run of the reference"),
    "verdict": Column("verdict", "", "against the reference: faster, slower, or not known"),
    "samples_per_second": Column("throughput", "samples/s", "samples over time of the timed steps, all ranks"),
    "tokens_per_second": Column(
        "tokens", "tokens/s", "tokens over the same time, all ranks; empty without tokens", 1, 0
    ),
    "model_flops_per_second": Column(
        "model FLOPs",
        "TFLOP/s",
        "FLOPs of forward and backward of these samples, over the same time, all ranks",
        1e-12,
        3,
    ),
    "mfu_pct": Column("MFU", "%", "model_flops_per_second as share of the peak of all devices; empty without a peak"),
    "timed_steps": Column("timed steps", "", "steps without the first, the profiled and the settling ones"),
}
PART_COLUMNS = {
    "profiled_step_ms": Column("step", "ms", f"profiled step; the following parts add up to it; {OF_STEPS}"),
    **{
        name: replace(
            EXPOSURE_COLUMNS[name],
            label="exposed " * name.startswith("exposed_") + EXPOSURE_COLUMNS[name].label,
            meaning=f"{EXPOSURE_COLUMNS[name].meaning}; {OF_STEPS}",
        )
        for name in TIME_PARTS
    },
}
SHARE_COLUMNS = {
    name: replace(TIME_COLUMNS[name], meaning=f"{TIME_COLUMNS[name].meaning}; mean over ranks", digits=1)
    for name in (
        "compute_pct",
        "non_compute_pct",
        "idle_pct",
        "overlap_pct",
        "collective_calls_per_step",
        "collective_bytes_per_step",
        "collective_sent_bytes_per_step",
    )
}
TRAFFIC_COLUMNS = {
    column: shown
    for kind, label in LABELS.items()
    for column, shown in (
        (f"{kind}_calls_per_step", Column(label, "calls/step", "calls of this kind, mean over ranks")),
        (f"{kind}_bytes_per_step", Column(label, "MiB/step", "their payload in bytes, mean over ranks", MIB, 3)),
    )
}
HELD_COLUMNS = {
    **{
        f"{component}_bytes": mib(label, f"storage of {label} at rest after a step, {OF_WORST_RANK}")
        for component, label in COMPONENTS.items()
    },
    "model_states_bytes": mib("model states", f"these four together at rest, {OF_WORST_RANK}"),
    "model_states_ratio": Column("ratio", "×", "model_states_bytes divided by the reference's", 1, 2),
    "expected_model_states_bytes": mib("formula", "parameters, gradients and optimizer states at rest by the formula"),
    "peak_model_states_bytes": mib("states, peak", f"most of the four at one moment of a step, {OF_WORST_RANK}"),
    "peak_bytes": mib("peak memory", f"most bytes of tensors at one moment of a step, {OF_WORST_RANK}"),
    "peak_ratio": Column("ratio", "×", "peak_bytes divided by the reference's", 1, 2),
    "peak_rss_bytes": mib("peak RSS", f"largest resident set, {OF_WORST_RANK}, in bytes"),
}
OUTCOME_COLUMNS = {
    "final_train_loss": Column("train loss", "nats", "loss of the last optimizer step", 1, 3),
    "eval_loss": Column("eval loss", "nats", "mean loss over the held-out samples", 1, 3),
    "eval_accuracy": Column("accuracy", "%", "fraction of held-out samples that are classified correctly", 100),
    "loss_difference": Column("off by", "nats", "largest difference of a step's loss from the reference's", 1, 7),
    "audit_failures": Column("audit", "", "checks of audit.csv that fail"),
    "world_size": Column("ranks", "", "ranks in the run"),
    "mesh": Column("mesh", "", "the ranks by dimension; empty without --mesh"),
    "backend": Column("backend", "", "gloo or nccl"),
    "backend_class": Column("class", "", "torch's class of the process group; ratios compare rows of one class"),
    "gpu_sharing": Column("GPUs", "", "how ranks share GPUs, empty if they do not; ratios compare rows with one value"),
    "run_id": Column("run", "", "run whose record and traces the row shows"),
}
COMPARISON_COLUMNS = {
    **CHOICE,
    **SPEED_COLUMNS,
    **PART_COLUMNS,
    **SHARE_COLUMNS,
    **TRAFFIC_COLUMNS,
    **HELD_COLUMNS,
    **OUTCOME_COLUMNS,
}

CHANGE_COLUMNS = {
    "figure": Column("figure", "", "what is compared"),
    "unit": Column("unit", "", "unit of baseline, run and change"),
    "baseline": Column("baseline", "", "value in the baseline: the median timed step, or the mean over profiled steps"),
    "run": Column("run", "", "value in the other run"),
    "change": Column("change", "", "run minus baseline"),
    "change_pct": Column("change", "%", "change divided by baseline; for step times, over steps timed in both"),
    "interval_low": Column("from", "%", "lower end of its 95 % interval"),
    "interval_high": Column("to", "%", "upper end of its 95 % interval"),
    "p_value": PValue(
        "p", "", "p-value of no difference: moderated t-test with the run as unit, corrected by Holm", 1, 4
    ),
    "result": Column("result", "", "better, worse, equal, or not known"),
}

CSV_COLUMNS = {
    "summary.csv": SUMMARY_COLUMNS,
    "exposure.csv": EXPOSURE_COLUMNS,
    "collectives.csv": COLLECTIVE_COLUMNS,
    "dimensions.csv": DIMENSION_COLUMNS,
    "pipeline.csv": PIPELINE_COLUMNS,
    "stragglers.csv": STRAGGLER_COLUMNS,
    "audit.csv": AUDIT_COLUMNS,
    "compare.csv": COMPARISON_COLUMNS,
    "changes.csv": CHANGE_COLUMNS,
}
"""By file, in the order of `docs/csv-columns.md`."""


def kinds_run(table: pd.DataFrame) -> list[str]:
    """The kinds of collective of which a row of `summary.csv` or `compare.csv` has at least one call."""
    return [kind for kind in LABELS if (table[f"{kind}_calls_per_step"] > 0).any()]
