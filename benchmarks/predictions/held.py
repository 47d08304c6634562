"""Predictions beside measurements, and what a table of them says."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pandas as pd

from ddp_lab.planner.plan_command import write

COLUMNS = ("setting", "choice", "what", "unit", "predicted", "measured")
APART_PCT = 5.0
Held = tuple[str, str, str, str, float, float]
"""The values of `COLUMNS`: one prediction and its measurement, both in `unit`. The setting is model, ranks and link;
choices are compared with each other within one. `what` is `step`, `peak` or `at rest`."""


def frame(rows: Sequence[Held]) -> pd.DataFrame:
    """One row for each prediction; columns are `COLUMNS` and `error_pct`."""
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.assign(error_pct=100 * (table["predicted"] / table["measured"] - 1))


def summary(table: pd.DataFrame) -> str:
    """Mean absolute error, the smallest and the largest."""
    errors = table.set_index("choice")["error_pct"].sort_values(key=abs)
    best, worst = (f"{errors.index[place]} {errors.iloc[place]:+.2f} %" for place in (0, -1))
    return f"mean absolute error {errors.abs().mean():.2f} % of {len(table)}; smallest {best}, largest {worst}"


def wrong_orders(table: pd.DataFrame) -> tuple[int, list[str]]:
    """How many pairs of choices of one setting are measured more than `APART_PCT` apart, and a sentence for each of
    them that is predicted the other way round."""
    pairs, wrong = 0, []
    for one, other in combinations(table.sort_values("measured").itertuples(), 2):
        apart = 100 * (other.measured / one.measured - 1)
        if one.setting == other.setting and apart > APART_PCT:
            pairs += 1
            if one.predicted >= other.predicted:
                wrong.append(
                    f"{one.setting}: {one.choice} is {apart:.0f} % faster than {other.choice}, predicted slower"
                )
    return pairs, wrong


def finish(rows: Sequence[Held], csv: Path | None) -> None:
    """Print every error, and a summary for each kind; write them as CSV.

    Raises:
        UserError: the file cannot be written.
    """
    table = frame(rows)
    for what, of_kind in table.groupby("what", sort=False):
        print(of_kind.to_string(index=False, float_format=lambda value: f"{value:,.2f}"))
        for setting, of_setting in of_kind.groupby("setting", sort=False):
            print(f"{setting}: {summary(of_setting)}")
        if what == "step":
            pairs, wrong = wrong_orders(of_kind)
            print(f"order of choices more than 5 % apart: {pairs - len(wrong)} of {pairs} right", *wrong, sep="\n  ")
        print()
    if csv is not None:
        write(csv, "--csv", table.to_csv(index=False))
