"""Step time over the rate of the link, from runs at several rates, and where one choice overtakes another."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from ddp_lab.analysis.columns import Column
from ddp_lab.analysis.comparison.compare import latest_record
from ddp_lab.analysis.errors import TraceError

MBIT = 1e-6
TABLE_NAME = "strategies.csv"
LOCAL = "local"
"""The same step without communication, which the link does not touch."""

RATE_COLUMNS = {
    "link": Column("link", "", "rate of every link in each direction, or unshaped"),
    "link_bits_per_s": Column("rate", "Mbit/s", "the same as a number, in bits a second; empty if unshaped", MBIT),
    "choice": Column("choice", "", "strategy"),
    "step_ms_median": Column("step time", "ms", "median milliseconds of an optimizer step"),
    "bound_ms": Column("bound", "ms", "shortest possible step with this traffic; empty if it was not computed"),
    "bound_ratio": Column("of bound", "×", "step_ms_median over bound_ms", 1, 2),
}
"""Of `link_rates.csv`."""
CROSSING_COLUMNS = {
    "link_bits_per_s": Column("crossing at", "Mbit/s", "where both are equal, between two measured rates", MBIT),
    "step_ms": Column("step time", "ms", "of both there"),
    "slower_links": Column("on slower links", "", "the faster of the two at the next slower measured rate"),
    "faster_links": Column("on faster links", "", "the faster of the two at the next faster measured rate"),
    "margin_pct": Column("margin", "%", "by how much they differ at these two rates; the smaller of both differences"),
}


def read_rates(folder: Path, rates: Mapping[str, int | None]) -> pd.DataFrame:
    """One row a link and choice, with `RATE_COLUMNS`; the slowest link first, and unshaped links last.

    Args:
        folder: Has a folder for each rate. In it is the table of `benchmarks/strategies.py`, or `profile/`, where the
            latest run of each choice counts.
        rates: Folder in it, and bits a second of its links; None if nothing limits them.

    Raises:
        TraceError: a file cannot be read, or there is none.
    """
    found = [of_folder(folder / link).assign(link=link, link_bits_per_s=rate) for link, rate in rates.items()]
    rows = pd.concat(found) if found else pd.DataFrame()
    if rows.empty:
        raise TraceError(f"{folder}: has no step times; no run there completed")
    numbers = ["link_bits_per_s", "step_ms_median", "bound_ms"]
    rows[numbers] = rows[numbers].apply(pd.to_numeric)
    rows["bound_ratio"] = rows["step_ms_median"] / rows["bound_ms"]
    return rows.sort_values("link_bits_per_s", kind="stable")[list(RATE_COLUMNS)].reset_index(drop=True)


def of_folder(folder: Path) -> pd.DataFrame:
    """Choice, step time and bound, in ms, of the runs at one rate."""
    path = folder / TABLE_NAME
    if path.exists():
        try:
            table = pd.read_csv(path)
            return table.reindex(columns=["choice", "step_ms_median", "bound_ms"]).dropna(subset=["step_ms_median"])
        except (OSError, ValueError) as error:
            raise TraceError(f"{path}: cannot be read as a table of benchmarks/strategies.py ({error})") from None
    records = [latest_record(choice_dir) for choice_dir in sorted(folder.glob("profile/*"))]
    rows = [
        {"choice": record["choice"], "step_ms_median": record["step_time_median_s"] * 1000, "bound_ms": math.nan}
        for record in records
        if record and record.get("step_time_median_s") is not None
    ]
    return pd.DataFrame(rows, columns=["choice", "step_ms_median", "bound_ms"])


def crossings(rows: pd.DataFrame) -> pd.DataFrame:
    """Where one choice overtakes another, with `CROSSING_COLUMNS`; the slowest link first.

    Between two rates, the logarithm of the step time is assumed to be a straight line over that of the rate.

    Args:
        rows: Of `read_rates`.
    """
    shaped = rows.dropna(subset=["link_bits_per_s"])
    times = shaped.pivot_table(index="link_bits_per_s", columns="choice", values="step_ms_median").transform(np.log)
    found = []
    for first, second in itertools.combinations([name for name in times.columns if name != LOCAL], 2):
        both = times[[first, second]].dropna()
        apart, of_first = (both[first] - both[second]).to_numpy(), both[first].to_numpy()
        rates = np.log(both.index.to_numpy(float))
        for here in np.flatnonzero(apart[:-1] * apart[1:] < 0):
            share = apart[here] / (apart[here] - apart[here + 1])
            slower, faster = (first, second) if apart[here] < 0 else (second, first)
            found.append(
                {
                    "link_bits_per_s": math.exp(rates[here] + share * (rates[here + 1] - rates[here])),
                    "step_ms": math.exp(of_first[here] + share * (of_first[here + 1] - of_first[here])),
                    "slower_links": slower,
                    "faster_links": faster,
                    "margin_pct": 100 * math.expm1(abs(apart[here : here + 2]).min()),
                }
            )
    return pd.DataFrame(found, columns=list(CROSSING_COLUMNS)).sort_values("link_bits_per_s", ignore_index=True)
