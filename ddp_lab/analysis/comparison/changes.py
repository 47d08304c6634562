"""What changed between runs of one choice: a row a figure, with its significance if it varies from run to run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ddp_lab.analysis.columns import COLUMNS, kind_of, kinds_run
from ddp_lab.analysis.comparison.compare import largest_difference, loss_unit, run_row, traced_row, with_loss_unit
from ddp_lab.analysis.comparison.timing import expected_of, timed_steps_ms
from ddp_lab.analysis.comparison.traced import Traced
from ddp_lab.analysis.metrics.significance import Estimate, difference, log_ratio, pooled, signs

BETTER, WORSE, EQUAL, UNKNOWN = "better", "worse", "equal", "not known"
STEP_TIME, THROUGHPUT, LOSSES_APART = "step_time_ms", "samples_per_s", "losses_apart"
PARTS = [name for name in COLUMNS["varying"] if name not in (STEP_TIME, THROUGHPUT)]


@dataclass(frozen=True)
class Run:
    """A run's record, and its traces' figures if it has traces."""

    record: dict[str, Any]
    traced: Traced | None


def changes(baseline: Sequence[Run], run: Sequence[Run], earlier: Sequence[dict[str, Any]] = ()) -> pd.DataFrame:
    """All figures of two sides, each of one run or several, side by side. `docs/csv-columns.md` explains the columns.

    Args:
        earlier: Records of other runs with the same settings, which show how much runs differ.
    """
    old, new = (pd.DataFrame([figures_of(side_run) for side_run in side]) for side in (baseline, run))
    records = [side_run.record for side_run in (*baseline, *run)]
    kinds = kinds_run(pd.concat([old[-1:], new[-1:]]))
    of_kinds = {name: column for name, column in COLUMNS["of_kinds"].items() if kind_of(name) in kinds}
    counted = COLUMNS["counted"] | of_kinds
    counted |= COLUMNS["at_rest"]
    shown = COLUMNS["varying"] | counted | with_loss_unit(COLUMNS["once"], loss_unit(records))
    table = pd.DataFrame({"figure": column.label, "unit": column.unit} for column in shown.values()).set_axis([*shown])
    # what varies from run to run is a mean over runs, all else is of the last run
    for name, side in (("baseline", old), ("run", new)):
        figures = side.reindex(columns=table.index).astype(float)
        table[name] = figures.mean(skipna=False).where(table.index.isin(list(COLUMNS["varying"])), figures.iloc[-1])
    is_equal = table["run"] == table["baseline"]
    table["change"] = table["run"] - table["baseline"]
    table["change_pct"] = (100 * (table["run"] / table["baseline"] - 1)).where(~is_equal, 0.0)
    table.loc[LOSSES_APART, "change"] = largest_difference(run[-1].record, baseline[-1].record)
    # counted figures differ for certain, figures that are measured once may differ by chance
    table["result"] = np.where(table["change"] == 0, EQUAL, UNKNOWN)
    is_counted = table.index.isin(list(counted))
    table.loc[is_counted & (table["change"] > 0), "result"] = WORSE
    table.loc[is_counted & (table["change"] < 0), "result"] = BETTER
    table = table.reindex(columns=list(COLUMNS["changes"]))
    estimates = {STEP_TIME: step_times(baseline, run, earlier)}
    estimates |= {column: difference(old[column].tolist(), new[column].tolist()) for column in PARTS}
    answers = [*signs([estimates[STEP_TIME]]), *signs([estimates[column] for column in PARTS])]
    for (column, estimate), (p_value, sign) in zip(estimates.items(), answers, strict=True):
        if not np.isnan(estimate.low):
            ends = np.array(estimate[:3])
            with np.errstate(divide="ignore", invalid="ignore"):
                percent = 100 * (np.expm1(ends) if column == STEP_TIME else ends / table.loc[column, "baseline"])
            result = EQUAL if table.loc[column, "change"] == 0 else {-1: BETTER, 0: UNKNOWN, 1: WORSE}[sign]
            table.loc[column, TEST] = [*percent, p_value, result]
    time = table.loc[STEP_TIME]
    if len({str(record["step_samples"]) for record in records}) == 1 and time[TEST].notna().all():
        percents = time[["change_pct", "interval_high", "interval_low"]].astype(float)
        rates = 100 * (1 / (1 + percents / 100) - 1)  # the inverse of step time
        table.loc[THROUGHPUT, TEST] = [*rates, time["p_value"], time["result"]]
    return table.reset_index(drop=True)


TEST = ["change_pct", "interval_low", "interval_high", "p_value", "result"]
"""Columns that a test fills."""


def figures_of(run: Run) -> dict[str, Any]:
    """The figures of a run by column; a rate is of the median step, which a few slow steps do not change."""
    row, times = {**run_row(run.record), **traced_row(run.traced)}, timed_steps_ms(run.record)
    rates = 1000 * pd.Series(run.record["step_samples"], dtype=float) / times
    accuracy = None if row["eval_accuracy"] is None else 100 * row["eval_accuracy"]
    return row | {STEP_TIME: times.median(), THROUGHPUT: rates.median(), "accuracy_pct": accuracy}


def step_times(baseline: Sequence[Run], run: Sequence[Run], earlier: Sequence[dict[str, Any]]) -> Estimate:
    """The logarithm of the ratio of step times."""
    first = timed_steps_ms(baseline[0].record)
    times = [[timed_steps_ms(side_run.record) for side_run in side] for side in (baseline, run)]
    old, new, before = ([log_ratio(ms, first) for ms in side] for side in (*times, map(timed_steps_ms, earlier)))
    expected = expected_of([(side_run.record, baseline[0].record) for side_run in (*baseline, *run)])
    return difference(old, new, pooled([before]).together(expected))


def exceeding(table: pd.DataFrame, percent: float) -> pd.DataFrame:
    """The rows that got worse by more than `percent` %."""
    return table[(table["result"] == WORSE) & (table["change_pct"].abs() > percent)]
