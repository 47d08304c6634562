"""Stragglers: which rank arrives last at collectives, how often, how late, and what that costs the other ranks."""

import pandas as pd

from ddp_lab.analysis.columns import COLUMNS
from ddp_lab.analysis.mesh import EVERYONE
from ddp_lab.analysis.metrics.exposure import Exposure
from ddp_lab.analysis.metrics.pipeline import PIPELINE
from ddp_lab.analysis.sentences import say

WORTH_NAMING = 0.01
"""A rank is named if it costs each of the others at least this share of a step."""


def stragglers(exposure: Exposure) -> pd.DataFrame:
    """A row a rank and step (stragglers.csv), over the collectives that could be matched."""
    calls = _comparable(exposure.collectives)
    is_late = calls["late_rank"] == calls["rank"]
    late = calls[is_late].groupby(["rank", "step"])["lateness_ms"]
    costs = calls[~is_late].groupby(["late_rank", "step"])["exposed_wait_ms"].sum().rename_axis(["rank", "step"])
    figures = {
        "collectives": calls.groupby(["rank", "step"]).size(),
        "last": late.size(),
        "lateness_ms": late.max(),
        "costs_ms": costs,
    }
    table = exposure.steps[["rank", "step"]].copy()
    places = pd.MultiIndex.from_frame(table)
    for name, values in figures.items():
        table[name] = values.reindex(places).fillna(0).to_numpy(float)
    return table.astype({"collectives": int, "last": int})[list(COLUMNS["stragglers"])]


def has_stages(calls: pd.DataFrame) -> bool:
    return bool((calls["dimension"] == PIPELINE).any())


def _comparable(calls: pd.DataFrame) -> pd.DataFrame:
    """Matched calls, without those over several stages of a pipeline, whose order its schedule sets."""
    across = (PIPELINE, EVERYONE) if has_stages(calls) else ()
    return calls[calls["late_rank"].notna() & ~calls["dimension"].isin(across)]


def lateness(table: pd.DataFrame) -> pd.DataFrame:
    """The table of `stragglers` by rank: collectives, last_pct, lateness_ms (the largest), costs_ms (mean of steps)."""
    groups = table.groupby("rank")
    sums = groups[["collectives", "last"]].sum()
    return pd.DataFrame(
        {
            "collectives": sums["collectives"],
            "last_pct": 100 * sums["last"] / sums["collectives"],
            "lateness_ms": groups["lateness_ms"].max(),
            "costs_ms": groups["costs_ms"].mean(),
        }
    ).reset_index()


def straggler(exposure: Exposure, ranks: pd.DataFrame) -> str:
    """A sentence on the rank that costs the others most, from the table of `lateness`."""
    worst = ranks.nlargest(1, "costs_ms").iloc[0]
    calls, steps = _comparable(exposure.collectives), exposure.steps
    waiting = calls[(calls["late_rank"] == worst["rank"]) & (calls["rank"] != worst["rank"])]
    step_ms, waiting_ranks = steps["step_ms"].mean(), waiting["rank"].nunique()
    each_ms = worst["costs_ms"] / waiting_ranks if waiting_ranks else 0.0
    return say("straggler", worst, each_ms, step_ms, WORTH_NAMING)
