"""What changed between runs of one choice: a row a figure, with its significance if it varies from run to run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddp_lab.analysis.columns import COLUMNS, COMPONENTS, kinds_run
from ddp_lab.analysis.comparison.compare import largest_difference, loss_unit, run_row, traced_row
from ddp_lab.analysis.comparison.timing import expected_of, timed_steps_ms
from ddp_lab.analysis.comparison.traced import Traced
from ddp_lab.analysis.metrics.significance import (
    Estimate,
    apart,
    difference,
    pooled,
    signs,
)
from ddp_lab.analysis.sentences import say
from ddp_lab.collectives.kinds import LABELS

BETTER, WORSE, EQUAL, UNKNOWN = "better", "worse", "equal", "not known"
NO_SPREAD = ("peak_rss_bytes",)
"""Bytes that are measured once, not counted. How much they vary is unknown."""
HELD = {f"{component}_bytes": f"{label}, at rest" for component, label in COMPONENTS.items()} | {
    "model_states_bytes": "model states, at rest",
    "peak_model_states_bytes": "model states, peak",
    "peak_bytes": "peak memory",
    "peak_rss_bytes": "peak RSS",
}
LOSSES_APART = "largest difference of training losses at one step"
PARTS = {
    "profiled_step_ms": "profiled step",
    "compute_ms": "compute",
    "exposed_wait_ms": "exposed wait",
    "exposed_transfer_ms": "exposed transfer",
    "exposed_copy_ms": "exposed copies",
    "idle_ms": "idle",
}


@dataclass(frozen=True)
class Run:
    """A run's record, and its traces' figures if it has traces."""

    record: dict[str, Any]
    traced: Traced | None


class Change(NamedTuple):
    """A row of `changes.csv`. `docs/csv-columns.md` explains the fields."""

    figure: str
    unit: str
    baseline: float
    run: float
    change: float
    change_pct: float
    interval_low: float = np.nan
    interval_high: float = np.nan
    p_value: float = np.nan
    result: str = UNKNOWN


def changes(baseline: Sequence[Run], run: Sequence[Run], earlier: Sequence[dict[str, Any]] = ()) -> pd.DataFrame:
    """All figures of two sides, each of one run or several, side by side.

    Args:
        earlier: Records of other runs with the same settings, which show how much runs differ.
    """
    sides = baseline, run
    old, new = ({**run_row(side[-1].record), **traced_row(side[-1].traced)} for side in sides)
    rows = [
        *spread_rows(baseline, run, earlier),
        *counted_rows(old, new),
        *single_rows(baseline[-1], run[-1], old, new),
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS["changes"]))


def plain(figure: str, unit: str, old: float | None, new: float | None, result: str = UNKNOWN) -> Change:
    """A change without an interval."""
    old, new = (np.nan if value is None else value for value in (old, new))
    if old == new:
        return Change(figure, unit, old, new, 0.0, 0.0, result=EQUAL)
    percent = 100 * (new / old - 1) if old else new * np.inf
    return Change(figure, unit, old, new, new - old, percent, result=result)


def spread_rows(baseline: Sequence[Run], run: Sequence[Run], earlier: Sequence[dict[str, Any]]) -> list[Change]:
    """Figures that vary from run to run. A side's figure is the mean over its runs."""

    def means(value_of: Callable[[Run], float]) -> tuple[float, float]:
        return mean([value_of(each) for each in baseline]), mean([value_of(each) for each in run])

    rows = [plain("step time", "ms", *means(lambda each: timed_steps_ms(each.record).median()))]
    estimates = [step_times(baseline, run, earlier)]
    for column, name in PARTS.items():
        old, new = ([traced_row(each.traced)[column] for each in side] for side in (baseline, run))
        rows.append(plain(name, "ms/step", mean(old), mean(new)))
        estimates.append(difference(old, new))
    tested = [
        tested_row(row, found, *answer, in_logs=row.figure == "step time")
        for row, found, answer in zip(rows, estimates, [*signs(estimates[:1]), *signs(estimates[1:])], strict=True)
    ]
    throughput = plain("throughput", "samples/s", *means(lambda each: median_rate(each.record)))
    if (
        len({str(each.record["step_samples"]) for each in (*baseline, *run)}) == 1
    ):  # then it is the inverse of step time
        throughput = inverse(throughput, tested[0])
    return [tested[0], throughput, *tested[1:]]


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def step_times(baseline: Sequence[Run], run: Sequence[Run], earlier: Sequence[dict[str, Any]]) -> Estimate:
    """The logarithm of the ratio of step times."""
    first = timed_steps_ms(baseline[0].record)
    times = [[timed_steps_ms(each.record) for each in side] for side in (baseline, run)]
    old, new, before = ([apart(one, first) for one in side] for side in (*times, map(timed_steps_ms, earlier)))
    expected = expected_of([(each.record, baseline[0].record) for each in (*baseline, *run)])
    return difference(old, new, pooled([before]).together(expected))


def median_rate(record: dict[str, Any]) -> float:
    """Samples per second of the median timed step. Unlike the mean of the run, a few slow steps do not change it."""
    samples = pd.Series(record["step_samples"], dtype=float)
    return float((1000 * samples / timed_steps_ms(record)).median())


def tested_row(row: Change, estimate: Estimate, p_value: float, sign: int, in_logs: bool) -> Change:
    """`row` with the result of the test. Lower is better.

    Args:
        in_logs: The estimate is of differences of logarithms. Otherwise it is of differences in the row's unit.
    """
    if np.isnan(estimate.low):
        return row
    ends = np.array([estimate.value, estimate.low, estimate.high])
    with np.errstate(divide="ignore", invalid="ignore"):
        value, low, high = (100 * np.expm1(ends) if in_logs else 100 * ends / row.baseline).tolist()
    result = EQUAL if row.change == 0 else {-1: BETTER, 0: UNKNOWN, 1: WORSE}[sign]
    return row._replace(change_pct=value, interval_low=low, interval_high=high, p_value=p_value, result=result)


def inverse(row: Change, times: Change) -> Change:
    """Samples per second with the result of the test of step times. Higher is better."""
    if np.isnan(times.interval_low):
        return row
    value, low, high = (
        100 * (1 / (1 + ratio / 100) - 1) for ratio in (times.change_pct, times.interval_high, times.interval_low)
    )
    return row._replace(
        change_pct=value, interval_low=low, interval_high=high, p_value=times.p_value, result=times.result
    )


def counted_rows(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Calls and bytes, which are counted exactly: every difference counts."""
    counted = {"collective_calls_per_step": ("collectives", "calls/step")}
    counted |= {"collective_bytes_per_step": ("payload", "bytes/step")}
    for kind in kinds_run(pd.DataFrame([old, new])):
        counted[f"{kind}_calls_per_step"] = (f"{LABELS[kind]}: calls", "calls/step")
        counted[f"{kind}_bytes_per_step"] = (f"{LABELS[kind]}: payload", "bytes/step")
    counted |= {name: (label, "bytes") for name, label in HELD.items() if name not in NO_SPREAD}
    rows = []
    for name, (figure, unit) in counted.items():
        result = WORSE if new[name] > old[name] else BETTER if new[name] < old[name] else UNKNOWN
        rows.append(plain(figure, unit, old[name], new[name], result))
    return rows


def single_rows(baseline: Run, run: Run, old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Figures measured once a run. If they differ, it is unknown whether by chance."""
    distance, unit = largest_difference(run.record, baseline.record), loss_unit([baseline.record, run.record])
    accuracy = [None if row["eval_accuracy"] is None else 100 * row["eval_accuracy"] for row in (old, new)]
    return [
        *(plain(HELD[name], "bytes", old[name], new[name]) for name in NO_SPREAD),
        plain("final training loss", unit, old["final_train_loss"], new["final_train_loss"]),
        Change(LOSSES_APART, unit, np.nan, np.nan, distance, np.nan, result=UNKNOWN if distance else EQUAL),
        plain("eval loss", unit, old["eval_loss"], new["eval_loss"]),
        plain("accuracy", "%", accuracy[0], accuracy[1]),
    ]


def exceeding(table: pd.DataFrame, percent: float) -> pd.DataFrame:
    """The rows that got worse by more than `percent` %."""
    return table[(table["result"] == WORSE) & (table["change_pct"].abs() > percent)]


def summary(table: pd.DataFrame) -> str:
    """What changed, in plain words."""
    first, _, *rest = rows_of(table)  # throughput says the same as step time
    return say("changes", first, rest)


def rows_of(table: pd.DataFrame) -> list[Change]:
    return [Change(*row) for row in table.itertuples(index=False)]
