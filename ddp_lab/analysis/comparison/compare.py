"""All choices side by side: a row a choice, from its latest run record and that run's traces."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddp_lab.analysis.columns import COLUMNS, COMPARISON_COLUMNS, Columns
from ddp_lab.analysis.comparison.fairness import by_class
from ddp_lab.analysis.comparison.timing import all_steps_ms, expected_of, passes_of, timed_steps_ms
from ddp_lab.analysis.comparison.traced import Traced
from ddp_lab.analysis.metrics.memory import memory_row
from ddp_lab.analysis.metrics.significance import (
    Estimate,
    estimate,
    log_ratio,
    residuals,
    signs,
    spread_of,
)
from ddp_lab.analysis.metrics.utilization import mfu
from ddp_lab.analysis.record import failure_of, read_record
from ddp_lab.analysis.sentences import say

REFERENCE = {"reports": "pytorch_ddp", "reports_sharding": "baseline", "reports_parallel": "tp"}
"""The choice that ratios refer to, by report folder."""
IS_REFERENCE, UNKNOWN = "reference", "not known"
MOST_SPREAD = 0.1
"""If runs differ by more than this from pass to pass, the machine is named as the reason."""
VERDICTS = {-1: "faster", 0: UNKNOWN, 1: "slower"}


class Standing(NamedTuple):
    """A run's step times compared with another run's.

    Attributes:
        estimate: The ratio of step times.
        p_value: Corrected for the number of comparisons.
        verdict: One of `VERDICTS`. It is faster or slower only if every pass agrees.
        by_pass: The ratio in each pass in which both have enough timed steps.
    """

    estimate: Estimate
    p_value: float
    verdict: str
    by_pass: dict[int, float]


def standings(records: Mapping[str, dict[str, Any]], reference: str) -> dict[str, Standing]:
    """Each other run compared with the run labelled `reference`, pass by pass."""
    base, logs = passes_of(records[reference]), logs_by_pass(records, reference)
    pairs = [(run, base[n]) for record in records.values() for n, run in passes_of(record).items() if n in base]
    spread = spread_of(logs).together(expected_of(pairs))
    by_pass: dict[str, pd.Series] = {name: logs.T[name].dropna() for name in records if name != reference}
    estimates = [estimate(float(ratios.mean()), (len(ratios), len(ratios)), spread) for ratios in by_pass.values()]
    standing = {}
    for (name, ratios), mean, (p_value, sign) in zip(by_pass.items(), estimates, signs(estimates), strict=True):
        verdict = VERDICTS[sign if (np.sign(ratios) == sign).all() else 0]
        standing[name] = Standing(mean.ratio(), p_value, verdict, np.exp(ratios).to_dict())
    return standing


def logs_by_pass(records: Mapping[str, dict[str, Any]], reference: str) -> pd.DataFrame:
    """The logarithm of each run's step time over the reference's, by choice (rows) and pass."""
    times = {name: {n: timed_steps_ms(run) for n, run in passes_of(record).items()} for name, record in records.items()}
    base = times[reference]
    rows = {name: {n: log_ratio(by_pass[n], base[n]) for n in base if n in by_pass} for name, by_pass in times.items()}
    return pd.DataFrame.from_dict(rows, orient="index", dtype=float)


def unsteady(records: Mapping[str, dict[str, Any]], reference: str) -> str:
    """A sentence on a machine that changed between passes, by more than `MOST_SPREAD`; else empty."""
    label = reference_in(records, reference)
    logs = logs_by_pass(records, label) if label else pd.DataFrame()
    deviation = spread_of(logs).variance ** 0.5
    if deviation <= MOST_SPREAD:
        return ""
    worst = str(residuals(logs).abs().max(axis="columns").idxmax())
    medians = {number: timed_steps_ms(run).median() for number, run in passes_of(records[worst]).items()}
    return say("unsteady", deviation, worst, medians)


def latest_record(choice_dir: Path) -> dict[str, Any] | None:
    """The newest record of a run that completed, or None. Each newer run that did not complete gets a warning.

    Raises:
        UserError: a record cannot be read.
    """
    for path in sorted(choice_dir.glob("*.run.json"), reverse=True):
        record = read_record(path, failed_too=True)
        problem = failure_of(record)
        if not problem:
            return record
        print(f"warning: {path}: {problem}, so it is left out", file=sys.stderr)
    return None


def comparison(
    records: Mapping[str, dict[str, Any]],
    traced: Mapping[str, Traced],
    reference: str,
    across_classes: bool = False,
) -> pd.DataFrame:
    """One row a run; `docs/csv-columns.md` explains each column. Runs over different backend classes are not compared.

    Args:
        records: Run records by label, those of one backend class in display order.
        traced: What their traces say; a run may have none.
        reference: The choice that ratios refer to, over the same backend class.
        across_classes: Compare all runs.
    """
    groups = by_class(records, across_classes)
    table = pd.DataFrame([row for group in groups for row in group_rows(group, traced, reference)])
    table = table.reindex(columns=list(COMPARISON_COLUMNS))
    for column in COUNTS:
        table[column] = table[column].astype("Int64").astype(object).where(table[column].notna(), None)
    table = table.round({column: 4 for column in COMPARISON_COLUMNS if column not in FINE})
    table.attrs["loss_unit"] = loss_unit(records.values())
    return table


def columns_of(table: pd.DataFrame) -> Columns:
    """The columns of a `comparison`, with the unit that its losses have."""
    return with_loss_unit(COMPARISON_COLUMNS, table.attrs["loss_unit"])


def with_loss_unit(columns: Columns, unit: str) -> Columns:
    """`columns`, with `unit` as the unit of losses."""
    return {name: replace(column, unit=unit) if column.unit == "nats" else column for name, column in columns.items()}


def group_rows(
    records: Mapping[str, dict[str, Any]], traced: Mapping[str, Traced], reference: str
) -> list[dict[str, Any]]:
    """Rows of runs that are compared with each other."""
    rows = [
        {**run_row(record), **traced_row(traced.get(name), [*passes_of(record)]), "choice": name, "verdict": UNKNOWN}
        for name, record in records.items()
    ]
    base = next((row for row in rows if row["choice"] == reference_in(records, reference)), None)
    if base is None:
        return rows
    stand = standings(records, base["choice"])
    for row in rows:
        name = row["choice"]
        row["loss_difference"] = largest_difference(records[name], records[base["choice"]])
        row |= {ratio: row[column] / (base[column] or np.nan) for column, ratio in RATIOS.items()}
        if row is base:
            row["verdict"] = IS_REFERENCE
            continue
        estimate, row["paired_p_value"], row["verdict"], by_pass = stand[name]
        row |= {"paired_ratio": estimate.value, "paired_ratio_low": estimate.low, "paired_ratio_high": estimate.high}
        row["passes"] = len(by_pass)
        if len(by_pass) > 1:
            row["step_time_ratio_by_pass"] = " ".join(f"{ratio:.2f}" for ratio in by_pass.values())
    return rows


def reference_in(records: Mapping[str, dict[str, Any]], reference: str) -> str:
    """The label of the reference among runs that are compared with each other; empty without one."""
    return next((label for label, record in records.items() if record["choice"] == reference), "")


FINE = ("paired_p_value", "loss_difference")
"""Columns that need more than four digits after the point."""
COUNTS = ("passes", "audit_failures")
"""Whole numbers, or empty."""
RATIOS = {
    "step_time_ms_median": "step_time_ratio",
    "model_states_bytes": "model_states_ratio",
    "peak_bytes": "peak_ratio",
}
"""Column, and the column of its ratio to the reference choice."""


def run_row(record: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run record."""
    times, utilization = all_steps_ms(record), mfu(record)
    memory = pd.DataFrame([memory_row(record, row["rank"]) for row in record["memory"]])
    return {
        "run_id": record["run_id"],
        "world_size": record["world_size"],
        "mesh": record["config"].get("mesh"),
        "backend": record["backend"],
        "backend_class": record["backend_class"],
        "gpu_sharing": record.get("gpu_sharing"),
        "timed_steps": len(times),
        "step_time_ms_median": times.median(),
        "step_time_ms_p25": times.quantile(0.25),
        "step_time_ms_p75": times.quantile(0.75),
        "samples_per_second": record["samples_per_second"],
        "tokens_per_second": record["tokens_per_second"],
        "model_flops_per_second": record["model_flops_per_second"],
        "mfu_pct": None if utilization is None else 100 * utilization,
        **{column: memory[column].max() for column in COLUMNS["memory"] if column in COMPARISON_COLUMNS},
        "final_train_loss": record["train_loss"][-1],
        **{f"eval_{name}": (record["eval"] or {}).get(name) for name in ("loss", "accuracy")},
    }


def traced_row(traced: Traced | None, passes: Sequence[int] = (1,)) -> dict[str, float]:
    """The figures of a run's traces (means over ranks and steps of these passes); NaN without traces."""
    if traced is None:
        return dict.fromkeys(
            [*COLUMNS["parts"], *COLUMNS["shares"], *COLUMNS["traffic"], "audit_failures"], float("nan")
        )
    steps = pd.concat([traced.steps[number] for number in passes if number in traced.steps] or [traced.steps[1]])
    return {
        "profiled_step_ms": steps["step_ms"].mean(),
        **{column: steps[column].mean() for column in COLUMNS["parts"] if column in steps},
        **{column: traced.summary[column].mean() for column in (*COLUMNS["shares"], *COLUMNS["traffic"])},
        "audit_failures": int((traced.audit["result"] == "fail").sum()) if len(traced.audit) else float("nan"),
    }


def loss_unit(records: Iterable[dict[str, Any]]) -> str:
    """`nats` for a cross-entropy, whose evaluation has an accuracy or a perplexity; empty for another loss."""
    answers = [record["eval"] for record in records if record["eval"]]
    entropies = (answer["accuracy"] is not None or answer["perplexity"] is not None for answer in answers)
    return "nats" if not answers or any(entropies) else ""


def largest_difference(record: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest difference of two runs' training losses at one optimizer step, in nats."""
    gaps = pd.Series(record["train_loss"], dtype=float) - pd.Series(reference["train_loss"], dtype=float)
    return float(gaps.abs().max())
