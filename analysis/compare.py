"""All choices side by side: a row a choice, from its latest run record and that run's summary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.columns import COMPARISON_COLUMNS, MEMORY_COLUMNS
from analysis.errors import TraceError
from analysis.memory import memory_row
from analysis.summary import read_record

REFERENCE = {"reports": "pytorch_ddp", "reports_sharding": "baseline"}
"""The choice that ratios refer to, by report folder."""


def latest_record(choice_dir: Path) -> dict[str, Any] | None:
    """The newest run record of a choice."""
    paths = sorted(choice_dir.glob("*.run.json"))
    return read_record(paths[-1]) if paths else None


def timed_steps_ms(record: dict[str, Any]) -> pd.Series:
    """Step times in ms, without the first step (warm-up) and those that the profiler bent."""
    times = pd.Series(record["step_time_s"][1:], dtype=float)
    return times.dropna() * 1000


def comparison(records: dict[str, dict[str, Any]], summaries: dict[str, pd.DataFrame], reference: str) -> pd.DataFrame:
    """One row a choice; `docs/csv-columns.md` explains each column.

    Args:
        records: Run record by choice, in display order.
        summaries: `summary.csv` by choice, of the same runs; a choice may have none.
        reference: The choice that `step_time_ratio` refers to.

    Raises:
        TraceError: there is no record, or the runs differ in more than their choice.
    """
    if not records:
        raise TraceError("no run record of any choice to compare; train first")
    require_comparable(records)
    rows = [comparison_row(record, summaries.get(choice)) for choice, record in records.items()]
    table = pd.DataFrame(rows)
    for column, ratio in RATIOS.items():
        base = table.loc[table["choice"] == reference, column]
        table[ratio] = table[column] / base.iloc[0] if len(base) else float("nan")
    return table[list(COMPARISON_COLUMNS)].round(4)


def comparison_row(record: dict[str, Any], summary: pd.DataFrame | None) -> dict[str, Any]:
    """The figures of one run; those that come from traces are means over ranks."""
    times = timed_steps_ms(record)
    row = {
        "choice": record["choice"],
        "run_id": record["run_id"],
        "world_size": record["world_size"],
        "backend": record["backend"],
        "timed_steps": len(times),
        "step_time_ms_median": times.median(),
        "step_time_ms_p25": times.quantile(0.25),
        "step_time_ms_p75": times.quantile(0.75),
        "samples_per_second": record["samples_per_second"],
    }
    for column in TRACE_COLUMNS:
        row[column] = summary[column].mean() if summary is not None else float("nan")
    memory = pd.DataFrame([memory_row(record, held["rank"]) for held in record["memory"]])
    for column in MEMORY_COLUMNS:
        if column in COMPARISON_COLUMNS:
            row[column] = memory[column].max()
    row["final_train_loss"] = record["train_loss"][-1]
    row["eval_loss"] = record["eval"]["loss"]
    row["eval_accuracy"] = record["eval"]["accuracy"]
    return row


def require_comparable(records: dict[str, dict[str, Any]]) -> None:
    """Refuse runs that differ in anything but their choice, since a table of them would not say what causes what.

    Raises:
        TraceError: names each setting that differs, with its values and whose they are.
    """
    differences = []
    for name, value_of in SETTINGS.items():
        choices: dict[str, list[str]] = {}
        for choice, record in records.items():
            choices.setdefault(str(value_of(record)), []).append(choice)
        if len(choices) > 1:
            listed = "; ".join(f"{value}: {', '.join(names)}" for value, names in choices.items())
            differences.append(f"{name} ({listed})")
    if differences:
        raise TraceError(
            f"these runs cannot stand in one table, for they differ in {', '.join(differences)}; train them alike"
        )


SETTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "workload": lambda record: record["config"].get("workload"),
    "model": lambda record: record["config"].get("model") or "the workload's",
    "parameters": lambda record: record.get("parameters"),
    "dataset": lambda record: record["config"].get("dataset") or "the workload's",
    "precision": lambda record: record["config"].get("precision"),
    "global batch size": lambda record: record["config"].get("global_batch_size"),
    "accumulated micro-batches": lambda record: record["config"].get("grad_accum_steps"),
    "optimizer": lambda record: record.get("optimizer", "not recorded"),
    "learning rate": lambda record: record["config"].get("lr"),
    "gradient norm": lambda record: record["config"].get("clip_grad_norm") or "not clipped",
    "optimizer steps": lambda record: len(record["train_loss"]),
    "seed": lambda record: record["config"].get("seed"),
    "ranks": lambda record: record["world_size"],
    "device": lambda record: record.get("device_name"),
    "backend": lambda record: record["backend"],
}
"""What runs in one table must have in common: name, and where a run record says it."""

RATIOS = {
    "step_time_ms_median": "step_time_ratio",
    "model_states_bytes": "model_states_ratio",
    "peak_bytes": "peak_ratio",
}
"""Column, and the column of its ratio to the reference choice."""

TRACE_COLUMNS = (
    "compute_pct",
    "non_compute_pct",
    "idle_pct",
    "overlap_pct",
    "collective_calls_per_step",
    "collective_bytes_per_step",
)
