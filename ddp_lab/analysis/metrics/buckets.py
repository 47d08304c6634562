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
    place = ["group", "sequence", "kind", "made_of"]
    own_row = len(collectives[place].drop_duplicates()) <= MOST_PLACES
    rows = []
    for _, calls in collectives.groupby(place if own_row else ["group", "kind", "made_of", "bytes"], dropna=False):
        shares = steps * calls["rank"].nunique()
        first, last = calls["sequence"].min(), calls["sequence"].max()
        rows.append(
            {
                "group": calls["group"].iloc[0],
                "place": f"{first}" if first == last else f"{first} to {last}",
                "kind": label(calls["kind"].iloc[0], calls["made_of"].iloc[0]),
                "bytes": calls["bytes"].median(),
                "calls_per_step": len(calls) / shares,
                "after_backward_ms": calls["after_backward_ms"].median(),
                "duration_ms": calls["duration_ms"].median(),
                "wait_ms": calls["wait_ms"].median(),
                "total_ms_per_step": calls["duration_ms"].sum() / shares,
                "exposed_ms_per_step": calls["exposed_ms"].sum() / shares,
                "busbw_gbps": calls["busbw_gbps"].median(),
                "busbw_gbps_best": calls["busbw_gbps"].max(),
                "first": first,
            }
        )
    table = pd.DataFrame(rows).sort_values(["group", "first"], kind="stable")
    return table[list(BUCKET_COLUMNS)].reset_index(drop=True)
