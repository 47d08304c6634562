"""The columns of the CSV files: label, unit, format and meaning. Pages and `docs/csv-columns.md` follow this table."""

from dataclasses import dataclass, replace

import pandas as pd

from analysis.traces.collectives import KINDS


@dataclass(frozen=True)
class Column:
    """How a column is shown: `scale` turns the CSV's value into `unit`, `digits` are those after the point."""

    label: str
    unit: str
    meaning: str
    scale: float = 1.0
    digits: int = 1

    def show(self, value: object) -> str:
        """The value as a person reads it, without its unit; a dash where there is none."""
        if value is None or value is pd.NA or value != value:  # NaN
            return "–"
        if isinstance(value, str) or self.unit == "":
            return str(value)
        return f"{float(value) * self.scale:,.{self.digits}f}"  # type: ignore[arg-type]


SCHEMA_VERSION = 2
"""Of all CSV files together. It goes up when a column comes, goes, moves or changes its meaning or unit."""


class PValue(Column):
    """A probability, of which a very small one is shown as below the last digit."""

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
"""Of model states: name in run records, and how people call them."""
SHARDABLE = ("parameters", "gradients", "optimizer_state")


def mib(label: str, meaning: str) -> Column:
    return Column(label, "MiB", meaning, MIB)


TIME_COLUMNS = {
    "rank": Column("rank", "", "rank of the process"),
    "world_size": Column("world size", "", "ranks in the run"),
    "trace_kind": Column("trace", "", "cpu: operators and Gloo spans, lowered; cuda: device kernels"),
    "steps": Column("steps", "", "profiled optimizer steps that were analysed"),
    "profiled_step_ms": Column("step", "ms", "mean duration of an analysed step; the profiler makes it longer"),
    "compute_ms": Column("compute", "ms", "time a step in which compute ran (HTA temporal breakdown)"),
    "non_compute_ms": Column(
        "exposed", "ms", "time a step in which only communication (on CUDA: or a memory copy) ran (HTA)"
    ),
    "idle_ms": Column("idle", "ms", "time a step in which nothing ran (HTA)"),
    "compute_pct": Column("compute", "%", "compute_ms as share of the time from the first kernel to the last"),
    "non_compute_pct": Column("exposed", "%", "non_compute_ms as share of the same"),
    "idle_pct": Column("idle", "%", "idle_ms as share of the same"),
    "overlap_pct": Column("overlap", "%", "share of communication time in which compute ran as well (HTA)"),
    "collective_calls_per_step": Column("collectives", "calls/step", "collectives that the rank took part in"),
    "collective_bytes_per_step": Column(
        "payload", "MiB/step", "their payload in bytes, by nccl-tests' definition", MIB, 3
    ),
}

KIND_COLUMNS = {
    column: shown
    for kind, label in KINDS.items()
    for column, shown in (
        (f"{kind}_calls_per_step", Column("calls", "calls/step", f"{label}: calls")),
        (f"{kind}_bytes_per_step", Column("payload", "MiB/step", f"{label}: payload in bytes", MIB, 3)),
        (f"{kind}_ms_per_step", Column("total time", "ms/step", f"{label}: sum of durations, hidden or not", 1, 2)),
    )
}

MEMORY_COLUMNS = {
    **{
        f"{component}_bytes": mib(f"{label}, at rest", f"storage of {label} after an optimizer step")
        for component, label in COMPONENTS.items()
    },
    "model_states_bytes": mib("states, at rest", "these four together"),
    **{
        f"expected_{component}_bytes": mib(
            f"{COMPONENTS[component]}, formula", f"{COMPONENTS[component]} by the formula"
        )
        for component in SHARDABLE
    },
    "expected_model_states_bytes": mib("states, formula", "these three together"),
    **{
        f"peak_{component}_bytes": mib(f"{label}, peak", f"most storage of {label} in the recorded step")
        for component, label in COMPONENTS.items()
    },
    "peak_model_states_bytes": mib("states, peak", "most of these four together at one moment"),
    "peak_bytes": mib("allocated, peak", "most bytes of tensors at one moment, activations and temporaries with them"),
    "peak_phase": Column("peak in", "", "in which part of the step that was"),
    "peak_rss_bytes": mib("RSS, peak", "largest resident set of the process, in bytes"),
}

SUMMARY_COLUMNS = {**TIME_COLUMNS, **KIND_COLUMNS, **MEMORY_COLUMNS}

EXPOSURE_COLUMNS = {
    "rank": Column("rank", "", "rank of the process"),
    "step": Column("step", "", "number of the optimizer step, from 0"),
    "step_ms": Column("step", "ms", "duration of the step under the profiler; the next four columns add up to it"),
    "compute_ms": Column("compute", "ms", "time in which compute ran"),
    "exposed_ms": Column("exposed", "ms", "no compute, and a collective under way; the last two columns add up to it"),
    "exposed_copy_ms": Column("copies", "ms", "neither of these, and a memory copy under way"),
    "idle_ms": Column("idle", "ms", "nothing of all this"),
    "exposed_wait_ms": Column("waiting", "ms", "exposed while the collective's last rank was not there"),
    "exposed_transfer_ms": Column("transfer", "ms", "exposed with all ranks there, or with no rank known to be late"),
}

COLLECTIVE_COLUMNS = {
    "rank": Column("rank", "", "rank of the process"),
    "step": Column("step", "", "optimizer step in which the collective was issued"),
    "group": Column("group", "", "process group: its ranks and name, or all ranks; empty where the trace does not say"),
    "sequence": Column("place", "", "its place among the group's collectives that the rank issued in the step, from 0"),
    "kind": Column("collective", "", "kind of collective"),
    "bytes": Column("payload", "MiB", "payload in bytes, by nccl-tests' definition of size", MIB, 3),
    "after_backward_ms": Column("start", "ms", "its start, after the end of the step's last backward pass", 1, 2),
    "duration_ms": Column("duration", "ms", "from its start to its end on this rank", 1, 2),
    "wait_ms": Column("wait", "ms", "from its start to the arrival of the last rank", 1, 2),
    "transfer_ms": Column("transfer", "ms", "from there to its end on this rank", 1, 2),
    "exposed_ms": Column("exposed", "ms", "time without compute that is laid to it", 1, 2),
    "exposed_wait_ms": Column("exposed wait", "ms", "of that, before the last rank's arrival", 1, 2),
    "late_rank": Column("last", "", "rank that arrived last"),
    "lateness_ms": Column("lateness", "ms", "how much later that was than the median arrival of the others", 1, 2),
    "done_after_ms": Column("moving", "ms", "from the last rank's arrival to the last rank's end", 1, 2),
    "algbw_gbps": Column("algbw", "GB/s", "payload over done_after_ms; none where a rank was done before", 1, 3),
    "busbw_gbps": Column("busbw", "GB/s", "algbw times nccl-tests' factor for the kind and the number of ranks", 1, 3),
}

STRAGGLER_COLUMNS = {
    "rank": EXPOSURE_COLUMNS["rank"],
    "step": EXPOSURE_COLUMNS["step"],
    "collectives": Column("collectives", "", "collectives of the rank in the step that could be matched over ranks"),
    "last": Column("last", "", "in how many of them it arrived last"),
    "lateness_ms": Column("lateness", "ms", "the most by which it then was later than the median of the others"),
    "costs_ms": Column("costs", "ms", "exposed waiting of all other ranks in those in which it arrived last", 1, 2),
}

BANDWIDTH_COLUMNS = {
    "kind": Column("collective", "", "kind of collective"),
    "size_bytes": Column("size", "", "class of payloads: from a power of two up to below the next"),
    "collectives": Column("count", "", "collectives of this kind and size, each counted once, not once a rank"),
    "bytes": Column("payload", "MiB", "median payload of these", MIB, 3),
    "done_after_ms": Column("time", "ms", "median time from the last rank's arrival to the last rank's end", 1, 3),
    "algbw_gbps": Column("algbw", "GB/s", "median of payload over that time", 1, 3),
    "busbw_gbps": Column("busbw", "GB/s", "median of algbw times nccl-tests' factor for kind and ranks", 1, 3),
    "busbw_gbps_p5": Column("p5", "GB/s", "busbw that 5 % of the collectives stay below", 1, 3),
    "busbw_gbps_p95": Column("p95", "GB/s", "busbw that 95 % of the collectives stay below", 1, 3),
    "busbw_gbps_best": Column("best", "GB/s", "largest busbw seen in this run at this size", 1, 3),
    "of_best_pct": Column("of best", "%", "median busbw as share of the best at this size", 1, 0),
}

BUCKET_COLUMNS = {
    "group": COLLECTIVE_COLUMNS["group"],
    "place": Column("place", "", "place among the group's collectives in the step; of several calls, first and last"),
    "kind": COLLECTIVE_COLUMNS["kind"],
    "bytes": Column("payload", "MiB/call", "payload of a call in bytes, by nccl-tests' definition of size", MIB, 3),
    "calls_per_step": Column("calls", "calls/step", "calls in one optimizer step"),
    "after_backward_ms": Column("start", "ms", "median start, after the end of the step's last backward pass", 1, 2),
    "duration_ms": Column("duration", "ms/call", "median time from start to end on a rank", 1, 2),
    "wait_ms": Column("wait", "ms/call", "median time from start to the arrival of the last rank", 1, 2),
    "total_ms_per_step": Column("total", "ms/step", "sum of durations in one optimizer step, hidden or not", 1, 2),
    "exposed_ms_per_step": Column("exposed", "ms/step", "time without compute that is laid to them", 1, 2),
    "busbw_gbps": Column("busbw", "GB/s", "median bus bandwidth", 1, 3),
}

AUDIT_COLUMNS = {
    "subject": Column("check", "", "what is checked"),
    "rank": Column("rank", "", "on which rank; none for what a run has once"),
    "unit": Column("unit", "", "of the figures in the row"),
    "expected": Column("expected", "", "by the strategy's formula or the run's configuration"),
    "measured": Column("measured", "", "by trace or record; of several steps, the value furthest from expected"),
    "difference": Column("difference", "", "measured less expected"),
    "tolerance": Column("tolerance", "", "the largest difference that passes"),
    "steps": Column("steps", "", "analysed steps held against it, those with a whole global batch; else none"),
    "result": Column("result", "", "pass, fail, or unknown where the trace does not say"),
}

OF_WORST_RANK = "of the rank that has most"
OF_STEPS = "mean over ranks and analysed steps"
PAIRS = "estimated over steps that were timed in both runs (Hodges and Lehmann)"
TIME_PARTS = ("compute_ms", "exposed_wait_ms", "exposed_transfer_ms", "exposed_copy_ms", "idle_ms")
CHOICE = {"choice": Column("choice", "", "strategy")}
SPEED_COLUMNS = {
    "step_time_ms_median": Column("step time", "ms", "median wall time of an optimizer step, batch loading included"),
    "step_time_ms_p25": Column("p25", "ms", "a quarter of the timed steps took at most this"),
    "step_time_ms_p75": Column("p75", "ms", "three quarters of the timed steps took at most this"),
    "step_time_ratio": Column("ratio", "×", "median step time over that of the reference choice", 1, 2),
    "paired_ratio": Column("by pairs", "×", f"step time over the reference's, {PAIRS}", 1, 3),
    "paired_ratio_low": Column("from", "×", "lower end of its 95 % interval", 1, 3),
    "paired_ratio_high": Column("to", "×", "upper end of its 95 % interval", 1, 3),
    "paired_p_value": PValue("p", "", "of Wilcoxon's signed-rank test over these pairs, corrected by Holm", 1, 4),
    "pairs": Column("pairs", "", "steps that were timed in both runs"),
    "verdict": Column("verdict", "", "against the reference: faster, slower, no difference seen, or unknown"),
    "samples_per_second": Column("throughput", "samples/s", "samples over time of the timed steps, all ranks"),
    "timed_steps": Column(
        "timed steps",
        "",
        "optimizer steps timed: not the first, none in which the choice settled, and none under the profiler",
    ),
}
PART_COLUMNS = {
    "profiled_step_ms": Column("step", "ms", f"profiled step, which the following add up to; {OF_STEPS}"),
    **{
        name: replace(EXPOSURE_COLUMNS[name], meaning=f"{EXPOSURE_COLUMNS[name].meaning}; {OF_STEPS}")
        for name in TIME_PARTS
    },
}
SHARE_COLUMNS = {
    "compute_pct": Column("compute", "%", "mean over ranks of summary.csv's column"),
    "non_compute_pct": Column("exposed", "%", "mean over ranks of summary.csv's column"),
    "idle_pct": Column("idle", "%", "mean over ranks of summary.csv's column"),
    "overlap_pct": Column("overlap", "%", "mean over ranks of summary.csv's column"),
    "collective_calls_per_step": Column("collectives", "calls/step", "mean over ranks of summary.csv's column"),
    "collective_bytes_per_step": Column(
        "payload", "MiB/step", "mean over ranks of summary.csv's column, in bytes", MIB
    ),
}
TRAFFIC_COLUMNS = {
    column: shown
    for kind, label in KINDS.items()
    for column, shown in (
        (f"{kind}_calls_per_step", Column(label, "calls/step", f"{label}: calls, mean over ranks")),
        (f"{kind}_bytes_per_step", Column(label, "MiB/step", f"{label}: payload in bytes, mean over ranks", MIB, 3)),
    )
}
HELD_COLUMNS = {
    **{
        f"{component}_bytes": mib(label, f"storage of {label} at rest after a step, {OF_WORST_RANK}")
        for component, label in COMPONENTS.items()
    },
    "model_states_bytes": mib("model states", f"these four together at rest, {OF_WORST_RANK}"),
    "model_states_ratio": Column("ratio", "×", "model_states_bytes over that of the reference choice", 1, 2),
    "expected_model_states_bytes": mib("formula", "parameters, gradients and optimizer states at rest by the formula"),
    "peak_model_states_bytes": mib("states, peak", f"most of these four at one moment of a step, {OF_WORST_RANK}"),
    "peak_bytes": mib("peak memory", f"most bytes of tensors at one moment of a step, {OF_WORST_RANK}"),
    "peak_ratio": Column("ratio", "×", "peak_bytes over that of the reference choice", 1, 2),
    "peak_rss_bytes": mib("peak RSS", f"largest resident set, {OF_WORST_RANK}, in bytes"),
}
OUTCOME_COLUMNS = {
    "final_train_loss": Column("train loss", "nats", "loss of the last optimizer step", 1, 3),
    "eval_loss": Column("eval loss", "nats", "mean loss over the held-out samples", 1, 3),
    "eval_accuracy": Column("accuracy", "%", "share of held-out samples that are classified right, as a fraction", 100),
    "loss_difference": Column(
        "off by", "nats", "most that the training loss differs from the reference's at one optimizer step", 1, 7
    ),
    "audit_failures": Column("audit", "", "checks of audit.csv that fail"),
    "world_size": Column("ranks", "", "ranks in the run"),
    "backend": Column("backend", "", "gloo or nccl"),
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
    "unit": Column("unit", "", "of baseline, run and change"),
    "baseline": Column(
        "baseline", "", "of the baseline: of the median timed step, or mean over ranks and profiled steps"
    ),
    "run": Column("run", "", "of the other run"),
    "change": Column("change", "", "run less baseline"),
    "change_pct": Column(
        "change", "%", "as share of baseline; where pairs of steps were tested, Hodges and Lehmann's estimate"
    ),
    "interval_low": Column("from", "%", "lower end of its 95 % interval"),
    "interval_high": Column("to", "%", "upper end of its 95 % interval"),
    "p_value": PValue("p", "", "of Wilcoxon's signed-rank test over pairs of steps, corrected by Holm", 1, 4),
    "result": Column("result", "", "better, worse, no difference seen, equal, or unknown where nobody can tell"),
}

CSV_COLUMNS = {
    "summary.csv": SUMMARY_COLUMNS,
    "exposure.csv": EXPOSURE_COLUMNS,
    "collectives.csv": COLLECTIVE_COLUMNS,
    "stragglers.csv": STRAGGLER_COLUMNS,
    "audit.csv": AUDIT_COLUMNS,
    "compare.csv": COMPARISON_COLUMNS,
    "changes.csv": CHANGE_COLUMNS,
}
"""By file, in the order in which `docs/csv-columns.md` has them."""
