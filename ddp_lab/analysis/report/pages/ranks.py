"""Runs of many ranks: a page shows three of them, the spread over all, and a heat map by step."""

from collections.abc import Iterable

import pandas as pd

from ddp_lab.analysis.report.figures.times import ranks_figure
from ddp_lab.analysis.report.page import Section, drawing

MOST_RANKS = 16
"""Ranks that a page shows in full."""
SPREAD = {"min": "least", "median": "median", "max": "most"}


def representatives(steps: pd.DataFrame, most: int = MOST_RANKS) -> dict[int, str]:
    """The ranks to show in full, and what each stands for: all of them, or the slowest, the median and the fastest.

    Ranks wait for each other, so their steps take equally long. They are ordered by their own mean time: the step
    without exposed waiting.

    Args:
        steps: Columns rank, step_ms, exposed_wait_ms: a row a rank and step.
    """
    own = (steps["step_ms"] - steps["exposed_wait_ms"].fillna(0)).groupby(steps["rank"]).mean()
    ranks = own.sort_values(kind="stable").index.tolist()
    if len(ranks) <= most:
        return dict.fromkeys(sorted(ranks), "")
    chosen = {ranks[-1]: "slowest", ranks[len(ranks) // 2]: "median", ranks[0]: "fastest"}
    return dict(sorted(chosen.items()))


def abridged(table: pd.DataFrame, ranks: Iterable[int]) -> pd.DataFrame:
    """A table with a row a rank. Of many ranks, the rows of `ranks`, and the least, median and most over all."""
    if table["rank"].nunique() <= MOST_RANKS:
        return table
    numbers = table.drop(columns="rank").select_dtypes("number").astype(float)
    spread = numbers.agg(list(SPREAD)).rename(index=SPREAD).rename_axis("rank").reset_index()
    return pd.concat([table[table["rank"].isin(ranks)], spread])


def ranks_section(steps: pd.DataFrame, ranks: dict[int, str]) -> Section:
    """Every rank and step, and which ranks the rest of the page shows."""
    named = ", ".join(f"rank {rank} ({role})" for rank, role in ranks.items())
    text = (
        f"Of {steps['rank'].nunique()} ranks, the page shows {named}, by step time without exposed waiting. The last "
        "rows of tables are the least, median and most over all ranks. The CSV files beside this page have every rank."
    )
    panels = {"step_ms": "step time", "exposed_wait_ms": "exposed waiting"}
    return Section("All ranks", text, figure=drawing(ranks_figure(steps, panels)))
