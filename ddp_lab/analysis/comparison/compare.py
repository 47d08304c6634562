"""All choices side by side: a row a choice, from its latest run record and that run's traces."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ddp_lab.analysis.columns import COMPARISON_COLUMNS, MEMORY_COLUMNS, PART_COLUMNS, SHARE_COLUMNS, TRAFFIC_COLUMNS
from ddp_lab.analysis.comparison.fairness import by_class
from ddp_lab.analysis.metrics.memory import memory_row
from ddp_lab.analysis.metrics.significance import Estimate, directions, paired_ratio
from ddp_lab.analysis.metrics.utilization import mfu
from ddp_lab.analysis.record import failure_of, read_record
from ddp_lab.analysis.summary import WindowAnalysis
from ddp_lab.analysis.traces.timeline import RankTimeline

REFERENCE = {"reports": "pytorch_ddp", "reports_sharding": "baseline", "reports_parallel": "tp"}
"""The choice that ratios refer to, by report folder."""
IS_REFERENCE, UNKNOWN = "reference", "unknown"
VERDICTS = {-1: "faster", 0: "no difference seen", 1: "slower", None: UNKNOWN}


@dataclass(frozen=True)
class Traced:
    """The part of a run's analysis that comparisons need. All events of many ranks would take too much memory.

    Attributes:
        summary: The table of `summary.csv`.
        steps: The table of `exposure.csv`.
        audit: The table of `audit.csv`.
        timeline: Of the rank whose lanes are drawn.
        step: The optimizer step that is drawn.
    """

    summary: pd.DataFrame
    steps: pd.DataFrame
    audit: pd.DataFrame
    timeline: RankTimeline
    step: int

    @property
    def failed_checks(self) -> list[str]:
        """Subjects of failed checks, each once."""
        return self.audit.loc[self.audit["result"] == "fail", "subject"].unique().tolist()


def keep(analysis: WindowAnalysis) -> Traced:
    """Choose what is drawn: the step of median duration (mean over ranks), and in it the rank of median duration.

    Of an even number, the shorter of the middle two counts.
    """
    durations = analysis.exposure.steps.pivot_table(index="step", columns="rank", values="step_ms")
    step = middle(durations.mean(axis="columns"))
    rank = middle(durations.T[step])
    timeline = next(timeline for timeline in analysis.timelines if timeline.rank == rank)
    return Traced(analysis.summary, analysis.exposure.steps, analysis.audit, timeline, step)


def middle(values: pd.Series) -> int:
    """The label of the lower median."""
    return int(values.sort_values(kind="stable").index[(len(values) - 1) // 2])


class Standing(NamedTuple):
    """A run's step times compared with another run's.

    Attributes:
        estimate: The ratio of step times.
        p_value: Corrected for the number of comparisons.
        verdict: One of `VERDICTS`.
    """

    estimate: Estimate
    p_value: float
    verdict: str


def standings(records: Mapping[str, dict[str, Any]], reference: str) -> dict[str, Standing]:
    """Every other run compared with the reference, over the steps timed in both; empty without the reference."""
    if reference not in records:
        return {}
    base = timed_steps_ms(records[reference])
    others = [name for name in records if name != reference]
    estimates = [paired_ratio(base, timed_steps_ms(records[name])) for name in others]
    answers = zip(others, estimates, directions(estimates, null=1.0), strict=True)
    return {name: Standing(found, p_value, VERDICTS[sign]) for name, found, (p_value, sign) in answers}


def latest_record(choice_dir: Path) -> dict[str, Any] | None:
    """The newest record of a run that completed, or None. Each newer run that did not complete gets a warning.

    Raises:
        TraceError: a record cannot be read.
    """
    for path in sorted(choice_dir.glob("*.run.json"), reverse=True):
        record = read_record(path, failed_too=True)
        problem = failure_of(record)
        if not problem:
            return record
        print(f"warning: {path}: {problem}, so it is left out", file=sys.stderr)
    return None


def timed_steps_ms(record: dict[str, Any]) -> pd.Series:
    """Step times in ms by step, without the first (warm-up), those in which the choice was still adapting, and profiled
    ones."""
    began = (record["resumed_from"] or {"step": 0})["step"]
    times = pd.Series(record["step_time_s"], dtype=float).iloc[began + max(1, record["settling_steps"]) :]
    return times.dropna() * 1000


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
    rows = [
        row | {"group": number} for number, group in enumerate(groups) for row in group_rows(group, traced, reference)
    ]
    table = pd.DataFrame(rows).reindex(columns=["group", *COMPARISON_COLUMNS])
    references = table[table["verdict"] == IS_REFERENCE].set_index("group")
    for column, ratio in RATIOS.items():
        table[ratio] = table[column] / table["group"].map(references[column].replace(0, float("nan")))
    digits = {column: 4 for column in COMPARISON_COLUMNS if column not in FINE}
    for column in COUNTS:
        table[column] = table[column].astype("Int64").astype(object).where(table[column].notna(), None)
    return table[list(COMPARISON_COLUMNS)].round(digits)


def group_rows(
    records: Mapping[str, dict[str, Any]], traced: Mapping[str, Traced], reference: str
) -> list[dict[str, Any]]:
    """Rows of runs that are compared with each other, but for the ratios of medians."""
    base_name = next((name for name, record in records.items() if record["choice"] == reference), "")
    stand, base = standings(records, base_name), records.get(base_name)
    rows = []
    for name, record in records.items():
        row = {**run_row(record), **traced_row(traced.get(name)), "choice": name, "verdict": UNKNOWN}
        row["loss_difference"] = largest_difference(record, base) if base else float("nan")
        if name == base_name:
            row["verdict"] = IS_REFERENCE
        elif name in stand:
            found = stand[name]
            row |= {"paired_ratio": found.estimate.value, "pairs": found.estimate.pairs, "verdict": found.verdict}
            row |= {"paired_ratio_low": found.estimate.low, "paired_ratio_high": found.estimate.high}
            row["paired_p_value"] = found.p_value
        rows.append(row)
    return rows


FINE = ("paired_p_value", "loss_difference")
"""Columns that need more than four digits after the point."""
COUNTS = ("pairs", "audit_failures")
"""Whole numbers, or empty."""
RATIOS = {
    "step_time_ms_median": "step_time_ratio",
    "model_states_bytes": "model_states_ratio",
    "peak_bytes": "peak_ratio",
}
"""Column, and the column of its ratio to the reference choice."""


def run_row(record: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run record."""
    times, utilization = timed_steps_ms(record), mfu(record)
    memory = pd.DataFrame([memory_row(record, held["rank"]) for held in record["memory"]])
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
        **{column: memory[column].max() for column in MEMORY_COLUMNS if column in COMPARISON_COLUMNS},
        "final_train_loss": record["train_loss"][-1],
        "eval_loss": record["eval"]["loss"],
        "eval_accuracy": record["eval"]["accuracy"],
    }


def traced_row(traced: Traced | None) -> dict[str, float]:
    """The figures of a run's traces (means over ranks and steps); NaN without traces."""
    if traced is None:
        return dict.fromkeys([*PART_COLUMNS, *SHARE_COLUMNS, *TRAFFIC_COLUMNS, "audit_failures"], float("nan"))
    return {
        "profiled_step_ms": traced.steps["step_ms"].mean(),
        **{column: traced.steps[column].mean() for column in PART_COLUMNS if column in traced.steps},
        **{column: traced.summary[column].mean() for column in (*SHARE_COLUMNS, *TRAFFIC_COLUMNS)},
        "audit_failures": int((traced.audit["result"] == "fail").sum()) if len(traced.audit) else float("nan"),
    }


def largest_difference(record: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest difference of two runs' training losses at one optimizer step, in nats."""
    apart = pd.Series(record["train_loss"], dtype=float) - pd.Series(reference["train_loss"], dtype=float)
    return float(apart.abs().max())
