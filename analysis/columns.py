"""The columns of the CSV files: label, unit, format and meaning. Pages and `docs/csv-columns.md` follow this table."""

from dataclasses import dataclass


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
        if value is None or value != value:  # NaN
            return "–"
        if isinstance(value, str) or self.unit == "":
            return str(value)
        return f"{float(value) * self.scale:,.{self.digits}f}"  # type: ignore[arg-type]


MIB = 1 / 2**20

SUMMARY_COLUMNS = {
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
    "all_reduce_calls_per_step": Column("all-reduces", "calls/step", "all-reduces alone"),
    "all_reduce_bytes_per_step": Column("all-reduce payload", "MiB/step", "their payload in bytes", MIB, 3),
    "all_reduce_ms_per_step": Column("all-reduce time", "ms/step", "sum of their durations, hidden or not"),
}

COMPARISON_COLUMNS = {
    "choice": Column("choice", "", "strategy"),
    "run_id": Column("run", "", "run whose record and traces the row shows"),
    "world_size": Column("ranks", "", "ranks in the run"),
    "backend": Column("backend", "", "gloo or nccl"),
    "timed_steps": Column("timed steps", "", "optimizer steps timed: not the first, and none under the profiler"),
    "step_time_ms_median": Column("step time", "ms", "median wall time of an optimizer step, batch loading included"),
    "step_time_ms_p25": Column("p25", "ms", "a quarter of the timed steps took at most this"),
    "step_time_ms_p75": Column("p75", "ms", "three quarters of the timed steps took at most this"),
    "step_time_ratio": Column("ratio", "×", "median step time over that of the reference choice", 1, 2),
    "samples_per_second": Column("throughput", "samples/s", "samples over time of the timed steps, all ranks"),
    "compute_pct": Column("compute", "%", "mean over ranks of summary.csv's column"),
    "non_compute_pct": Column("exposed", "%", "mean over ranks of summary.csv's column"),
    "idle_pct": Column("idle", "%", "mean over ranks of summary.csv's column"),
    "overlap_pct": Column("overlap", "%", "mean over ranks of summary.csv's column"),
    "collective_calls_per_step": Column("collectives", "calls/step", "mean over ranks of summary.csv's column"),
    "collective_bytes_per_step": Column(
        "payload", "MiB/step", "mean over ranks of summary.csv's column, in bytes", MIB
    ),
    "peak_bytes": Column("peak memory", "MiB", "most bytes of tensors on the rank that held most", MIB),
    "peak_rss_bytes": Column("peak RSS", "MiB", "largest resident set of the rank that had most, in bytes", MIB),
    "final_train_loss": Column("train loss", "nats", "loss of the last optimizer step", 1, 3),
    "eval_loss": Column("eval loss", "nats", "mean loss over the held-out samples", 1, 3),
    "eval_accuracy": Column("accuracy", "%", "share of held-out samples that are classified right, as a fraction", 100),
}
