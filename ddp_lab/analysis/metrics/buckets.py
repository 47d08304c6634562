"""Calls by bucket: what each message of a step costs, to choose a bucket size by."""

import pandas as pd

from ddp_lab.analysis.columns import BUCKET_COLUMNS
from ddp_lab.analysis.traces.collectives import label

MOST_PLACES = 32
"""Up to this many calls of a step get a row each. If there are more, calls of one kind and size share a row."""


def buckets(collectives: pd.DataFrame, steps: int) -> pd.DataFrame:
    """The table of `collectives.csv` by place in the step, or by kind and size (`BUCKET_COLUMNS`).

    Counts and sums are means over steps and participating ranks. Times of a call are medians.

    Args:
        steps: Number of analysed steps.
    """
    named = collectives.assign(
        group=collectives["dimension"].where(collectives["dimension"] != "", collectives["group"]),
        kind=[label(*call) for call in zip(collectives["kind"], collectives["made_of"], strict=True)],
    )
    places = len(named[["group", "sequence", "kind"]].drop_duplicates())
    alike = named["sequence" if places <= MOST_PLACES else "bytes"]
    calls = named.assign(alike=alike, place=named["sequence"]).groupby(["group", "kind", "alike"], dropna=False)
    medians = calls[["bytes", "after_backward_ms", "duration_ms", "busbw_gbps"]].median()
    means = calls.agg(
        calls_per_step=("rank", "size"),
        total_ms_per_step=("duration_ms", "sum"),
        exposed_ms_per_step=("exposed_ms", "sum"),
    ).div(steps * calls["rank"].nunique(), axis="index")
    table = medians.join([means, calls["place"].min()]).reset_index()
    return table.sort_values(["group", "place"], kind="stable")[list(BUCKET_COLUMNS)].reset_index(drop=True)
