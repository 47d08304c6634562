"""One prediction beside one measurement, and what a table of them says."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import pandas as pd

from planner.plan_command import write

APART_PCT = 5.0


@dataclass(frozen=True)
class Held:
    """One prediction and its measurement, both in `unit`.

    Attributes:
        setting: Model, ranks and link. Choices are compared with each other within one setting.
        what: `step`, `peak` or `at rest`.
    """

    setting: str
    choice: str
    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error_pct(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


def frame(rows: Sequence[Held]) -> pd.DataFrame:
    """One row for each prediction; columns are the attributes of `Held` and `error_pct`."""
    return pd.DataFrame([{**asdict(row), "error_pct": row.error_pct} for row in rows])


def summary(rows: Sequence[Held]) -> str:
    """Mean absolute error, the smallest and the largest."""
    ordered = sorted(rows, key=lambda row: abs(row.error_pct))
    mean = sum(abs(row.error_pct) for row in rows) / len(rows)
    best, worst = (f"{row.choice} {row.error_pct:+.2f} %" for row in (ordered[0], ordered[-1]))
    return f"mean absolute error {mean:.2f} % of {len(rows)}; smallest {best}, largest {worst}"


def wrong_orders(rows: Sequence[Held]) -> tuple[int, list[str]]:
    """How many pairs of choices of one setting are measured more than `APART_PCT` apart, and a sentence for each of
    them that is predicted the other way round."""
    pairs, wrong = 0, []
    for one, other in combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: row.measured)
        if one.setting != other.setting or slow.measured <= fast.measured * (1 + APART_PCT / 100):
            continue
        pairs += 1
        if fast.predicted >= slow.predicted:
            apart = 100 * (slow.measured / fast.measured - 1)
            wrong.append(f"{one.setting}: {fast.choice} is {apart:.0f} % faster than {slow.choice}, predicted slower")
    return pairs, wrong


def finish(rows: Sequence[Held], csv: Path | None) -> None:
    """Print every error, and a summary for each kind; write them as CSV.

    Raises:
        UserError: the file cannot be written.
    """
    for what in dict.fromkeys(row.what for row in rows):
        of_kind = [row for row in rows if row.what == what]
        print(frame(of_kind).to_string(index=False, float_format=lambda value: f"{value:,.2f}"))
        for of_setting in dict.fromkeys(row.setting for row in of_kind):
            print(f"{of_setting}: {summary([row for row in of_kind if row.setting == of_setting])}")
        if what == "step":
            pairs, wrong = wrong_orders(of_kind)
            print(f"order of choices more than 5 % apart: {pairs - len(wrong)} of {pairs} right", *wrong, sep="\n  ")
        print()
    if csv is not None:
        write(csv, "--csv", frame(rows).to_csv(index=False))
