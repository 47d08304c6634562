"""Matching the calls of several ranks: which calls are one collective, on one clock, and which rank arrived last.

Within a process group all ranks issue the same collectives in the same order. So a call is identified by its step, its
group and its place among the group's calls in that step. It is matched if every member of the group has a call of the
same kind there. Messages between two ranks have no such order and are not matched. Neither are calls of a trace that
has several groups but does not say to which one a call belongs.

Clocks of different hosts differ. Collectives in which every rank needs every other rank's data end on all ranks at
about the same moment, so the median difference of their ends estimates the difference of the clocks. It is used only
where it is larger than its own spread.
"""

import numpy as np
import pandas as pd

from ddp_lab.analysis.traces.timeline import RankTimeline
from ddp_lab.collectives.kinds import MESSAGE

KEY = ["step", "group", "sequence"]
ENOUGH_ENDS = 3
"""Collectives that two ranks must share before their clocks are compared."""
ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def matched_calls(timelines: list[RankTimeline], is_complete: bool = True) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The collectives of all ranks, and the clocks. Nothing is matched in a window from which ranks are missing.

    Returns:
        The ranks' `collectives_by_step`, with columns rank, sequence (place among those of the group in the step),
        is_matched, last_arrival (us, on the rank's own clock), late_rank, lateness (us, after the median of the
        others), done_after (us, from the last arrival to the last rank's end). The last four are empty where a call is
        not matched. The second value is that of `clock_offsets`.
    """
    tables = [timeline.collectives_by_step().assign(rank=timeline.rank) for timeline in timelines]
    calls = pd.concat(tables, ignore_index=True)
    is_message = calls["kind"] == MESSAGE
    calls["sequence"] = calls.groupby(["rank", "step", "group", is_message]).cumcount()
    shared = calls[~is_message & (calls["group"] != "") & is_complete]
    matched = shared[_is_matched(shared, len(timelines))]
    calls["is_matched"] = calls.index.isin(matched.index)
    clocks = clock_offsets(matched, [timeline.rank for timeline in timelines])
    ahead = matched["rank"].map(clocks.set_index("rank")["offset_ms"]) * 1000
    arrivals = _arrivals(matched.assign(start=matched["start"] - ahead, end=matched["end"] - ahead))
    arrivals["last_arrival"] += ahead
    return calls.join(arrivals), clocks


def _is_matched(calls: pd.DataFrame, ranks: int) -> "pd.Series[bool]":
    """Whether all members of a call's group have a call like it. A group of unknown size counts as that of all ranks.

    If ranks have different numbers of calls in a step, a call was not recorded. It is unknown which one, so none of
    the group's calls in that step is matched.
    """
    counts = calls.groupby(["step", "group", "rank"])["start"].transform("size")
    same_number = counts.groupby([calls["step"], calls["group"]]).transform("nunique") == 1
    place = calls.groupby(KEY)
    everybody = place["rank"].transform("size") == calls["group_size"].fillna(ranks)
    same_size = (place["bytes"].transform("nunique") <= 1) | (calls["kind"] == "all_to_all")  # may share out unevenly
    return same_number & everybody & same_size & (place["kind"].transform("nunique") == 1)


def _arrivals(calls: pd.DataFrame) -> pd.DataFrame:
    """Of matched calls: last_arrival, late_rank, lateness and done_after. All times are on one clock."""
    place = calls.groupby(KEY)
    last = place["start"].transform("max")
    late_rank = calls["rank"].loc[place["start"].transform("idxmax")].set_axis(calls.index)
    median = calls["start"].where(calls["rank"] != late_rank).groupby([calls[name] for name in KEY]).transform("median")
    is_shared = place["rank"].transform("size") > 1  # a rank alone is not late
    return pd.DataFrame(
        {
            "last_arrival": last,
            "late_rank": late_rank.where(is_shared).astype("Int64"),
            "lateness": last - median,
            "done_after": place["end"].transform("max") - last,
        }
    )


def clock_offsets(calls: pd.DataFrame, ranks: list[int]) -> pd.DataFrame:
    """Columns rank, offset_ms, residual_ms, from the ends of matched collectives.

    A rank that shares no collective with the first is compared with a rank that does, and so on.

    Args:
        calls: Columns rank, kind, end, and `KEY`.
        ranks: Offsets are from the clock of the first.
    """
    ends = (
        calls[calls["kind"].isin(ENDS_TOGETHER)].pivot(index=KEY, columns="rank", values="end").reindex(columns=ranks)
    )
    shared = ends.notna().astype(int)
    often = shared.T @ shared
    clocks = {ranks[0]: (0.0, 0.0)}
    while len(clocks) < len(ranks):
        pairs = often.loc[list(clocks), [rank for rank in ranks if rank not in clocks]].stack()
        aligned, rank = pairs.index[int(pairs.to_numpy().argmax())]
        lags = (ends[rank] - ends[aligned]).dropna() / 1000
        offset = lags.median() if len(lags) >= ENOUGH_ENDS else 0.0
        if abs(offset) <= 3 * (lags - offset).abs().median():  # within the usual scatter of ends
            offset = 0.0
        residual = (lags - offset).abs().median() if len(lags) >= ENOUGH_ENDS else np.nan
        clocks[rank] = (clocks[aligned][0] + offset, residual)
    rows = [(rank, *clocks[rank]) for rank in ranks]
    return pd.DataFrame(rows, columns=["rank", "offset_ms", "residual_ms"])
