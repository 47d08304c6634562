"""One prediction beside one measurement, and what a table of them says."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median

import pandas as pd
from rich.console import Console
from rich.table import Table

from training.errors import UserError

APART_PCT = 5.0
"""Choices whose measured step times differ by more than this have an order that a prediction must get right."""


@dataclass(frozen=True)
class Held:
    """One prediction and its measurement, both in `unit`.

    Attributes:
        setting: Under which conditions; choices are compared with each other within one setting.
        choice: The strategy, with its settings.
        what: `step` or the kind of memory.
        calibrates: Whether the measurement was used to predict; then it counts in no figure.
    """

    setting: str
    choice: str
    what: str
    unit: str
    predicted: float
    measured: float
    calibrates: bool = False

    @property
    def error_pct(self) -> float:
        """Of the prediction, in percent of the measurement."""
        return 100 * (self.predicted / self.measured - 1)


def frame(rows: Sequence[Held]) -> pd.DataFrame:
    """A row a prediction; columns are the attributes of `Held` and `error_pct`."""
    return pd.DataFrame([{**asdict(row), "error_pct": row.error_pct} for row in rows])


def printed(rows: Sequence[Held], title: str) -> Table:
    """The table for the terminal, with every error."""
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for heading in ("setting", "choice", "what", "predicted", "measured", "", "error"):
        table.add_column(heading, justify="right" if heading in ("predicted", "measured", "error") else "left")
    for row in rows:
        numbers = (f"{row.predicted:,.2f}", f"{row.measured:,.2f}", row.unit, f"{row.error_pct:+.2f} %")
        mark = " (calibrates)" if row.calibrates else ""
        table.add_row(row.setting, row.choice + mark, row.what, *numbers)
    return table


def summary(rows: Sequence[Held], bar_pct: float, stretch_pct: float | None = None) -> str:
    """Mean absolute error, best and worst, of those rows that did not calibrate, beside the bar."""
    counted = sorted((row for row in rows if not row.calibrates), key=lambda row: abs(row.error_pct))
    if not counted:
        return "nothing to hold against: every row calibrates"
    mean = sum(abs(row.error_pct) for row in counted) / len(counted)
    best, worst = counted[0], counted[-1]
    bar = f"bar {bar_pct:g} %" + (f", stretch {stretch_pct:g} %" if stretch_pct is not None else "")
    return (
        f"mean absolute error {mean:.2f} % of {len(counted)} ({bar}); best {named(best)} {best.error_pct:+.2f} %, "
        f"worst {named(worst)} {worst.error_pct:+.2f} %"
    )


def mean_error_pct(rows: Sequence[Held]) -> float:
    """Mean absolute error in percent, of those rows that did not calibrate; nan of none."""
    errors = [abs(row.error_pct) for row in rows if not row.calibrates]
    return sum(errors) / len(errors) if errors else float("nan")


def median_of(takes: Sequence[Held]) -> list[Held]:
    """One row for each setting, choice and kind, with the medians of all its takes, in the order of the first ones."""
    return [
        replace(rows[0], predicted=median(row.predicted for row in rows), measured=median(row.measured for row in rows))
        for rows in by_case(takes)
    ]


def spread_pct(takes: Sequence[Held]) -> float:
    """How far measured steps are from the median of their takes, in percent of it, on average: no prediction of one
    take could be closer."""
    away = []
    for rows in by_case([row for row in takes if row.what == "step"]):
        middle = median(row.measured for row in rows)
        away += [100 * abs(row.measured / middle - 1) for row in rows]
    return mean(away)


def by_case(takes: Sequence[Held]) -> list[list[Held]]:
    cases: dict[tuple[str, str, str], list[Held]] = {}
    for row in takes:
        cases.setdefault((row.setting, row.choice, row.what), []).append(row)
    return list(cases.values())


def named(row: Held) -> str:
    return f"{row.choice} ({row.setting}, {row.what})"


def wrong_orders(rows: Sequence[Held]) -> tuple[int, list[str]]:
    """How many pairs of choices of one setting are measured more than `APART_PCT` apart; those predicted the other way
    round, a sentence each."""
    pairs, wrong = 0, []
    for one, other in combinations([row for row in rows if row.what == "step"], 2):
        fast, slow = sorted((one, other), key=lambda row: row.measured)
        if one.setting != other.setting or slow.measured <= fast.measured * (1 + APART_PCT / 100):
            continue
        pairs += 1
        if fast.predicted >= slow.predicted:
            apart = 100 * (slow.measured / fast.measured - 1)
            wrong.append(f"{one.setting}: {fast.choice} is {apart:.0f} % faster than {slow.choice}, predicted slower")
    return pairs, wrong


def show(rows: Sequence[Held], title: str, bar_pct: float, stretch_pct: float | None = None) -> None:
    """Print table and summary."""
    console = Console(highlight=False, width=160)
    console.print(printed(rows, title))
    console.print(summary(rows, bar_pct, stretch_pct))


def write(rows: Sequence[Held], path: Path | None) -> None:
    """As CSV.

    Raises:
        UserError: it cannot be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        frame(rows).to_csv(path, index=False)
    except OSError as error:
        raise UserError(f"--csv {path}: cannot be written: {error.strerror}") from None
    print(f"table: {path}")
