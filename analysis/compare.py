"""All choices side by side: a row a choice, from its latest run record and that run's summary."""

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.errors import TraceError
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
        TraceError: there is no record.
    """
    if not records:
        raise TraceError("no run record of any choice to compare; train first")
    rows = [comparison_row(record, summaries.get(choice)) for choice, record in records.items()]
    table = pd.DataFrame(rows)
    base = table.loc[table["choice"] == reference, "step_time_ms_median"]
    ratio = table["step_time_ms_median"] / base.iloc[0] if len(base) else float("nan")
    table.insert(table.columns.tolist().index("step_time_ms_p75") + 1, "step_time_ratio", ratio)
    return table.round(4)


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
    peaks = [memory["peak_bytes"] for memory in record["memory"] if memory["peak_bytes"] is not None]
    row["peak_bytes"] = max(peaks) if peaks else float("nan")
    row["peak_rss_bytes"] = max(memory["peak_rss_bytes"] for memory in record["memory"])
    row["final_train_loss"] = record["train_loss"][-1]
    row["eval_loss"] = record["eval"]["loss"]
    row["eval_accuracy"] = record["eval"]["accuracy"]
    return row


TRACE_COLUMNS = (
    "compute_pct",
    "non_compute_pct",
    "idle_pct",
    "overlap_pct",
    "collective_calls_per_step",
    "collective_bytes_per_step",
)
