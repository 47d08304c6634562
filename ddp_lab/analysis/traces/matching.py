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
        last_arrival (us, on the rank's own clock), late_rank, lateness (us, after the median of the others), done_after
        (us, from the last arrival to the last rank's end). These are empty where a call is not matched.
        The second value is that of `clock_offsets`.
    """
    calls = pd.concat([_numbered(timeline) for timeline in timelines], ignore_index=True)
    calls["is_matched"] = _is_matched(calls, len(timelines)) & is_complete
    matched = calls[calls["is_matched"]]
    clocks = clock_offsets(matched, [timeline.rank for timeline in timelines])
    ahead = calls["rank"].map(clocks.set_index("rank")["offset_ms"]) * 1000
    ours = ahead[matched.index]
    together = _arrivals(matched.assign(start=matched["start"] - ours, end=matched["end"] - ours))
    calls = calls.join(together, on=KEY)
    unmatched = ~calls["is_matched"]
    calls.loc[unmatched, ["last_arrival", "lateness", "done_after"]] = np.nan
    calls.loc[unmatched, "late_rank"] = pd.NA
    calls["last_arrival"] += ahead
    return calls, clocks


def _numbered(timeline: RankTimeline) -> pd.DataFrame:
    calls = timeline.collectives_by_step().assign(rank=timeline.rank)
    is_message = calls["kind"] == MESSAGE
    return calls.assign(sequence=calls.groupby(["step", "group", is_message]).cumcount())


def _is_matched(calls: pd.DataFrame, ranks: int) -> "pd.Series[bool]":
    """Whether all members of a call's group have a call like it. A group of unknown size counts as that of all ranks.

    If ranks have different numbers of calls in a step, a call was not recorded. It is unknown which one, so none of
    the group's calls in that step is matched.
    """
    is_message = calls["kind"] == MESSAGE
    in_step = ["step", "group", is_message]
    counts = calls.groupby([*in_step, "rank"])["start"].transform("size")
    same_number = counts.groupby([calls["step"], calls["group"], is_message]).transform("nunique") == 1
    place = calls.groupby([*KEY, is_message])
    everybody = place["rank"].transform("size") == calls["group_size"].fillna(ranks)
    alike = (place["kind"].transform("nunique") == 1) & (
        (place["bytes"].transform("nunique") <= 1) | (calls["kind"] == "all_to_all")  # which may share out unevenly
    )
    return same_number & everybody & alike & (calls["group"] != "") & ~is_message


def _arrivals(calls: pd.DataFrame) -> pd.DataFrame:
    """By `KEY`: last_arrival, late_rank, lateness and done_after of matched calls. All times are on one clock."""
    starts = calls.pivot(index=KEY, columns="rank", values="start")
    ends = calls.pivot(index=KEY, columns="rank", values="end").max(axis="columns")
    table = pd.DataFrame({"last_arrival": starts.max(axis="columns")}, index=starts.index)
    is_shared = starts.notna().sum(axis="columns") > 1  # a rank alone is not late
    table["late_rank"] = starts.idxmax(axis="columns").where(is_shared).astype("Int64") if len(starts) else pd.NA
    others = starts.where(
        starts.columns.to_numpy()[None, :] != table["late_rank"].to_numpy(float, na_value=-1)[:, None]
    )
    table["lateness"] = table["last_arrival"] - others.median(axis="columns")
    table["done_after"] = ends - table["last_arrival"]
    return table


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
    found = {ranks[0]: (0.0, 0.0)}
    while len(found) < len(ranks):
        pairs = often.loc[list(found), [rank for rank in ranks if rank not in found]].stack()
        known, rank = pairs.index[int(pairs.to_numpy().argmax())]
        apart = (ends[rank] - ends[known]).dropna()
        is_known = len(apart) >= ENOUGH_ENDS
        offset = float(apart.median()) if is_known else 0.0
        if abs(offset) <= 3 * (apart - offset).abs().median():  # within the usual scatter of ends
            offset = 0.0
        residual = float((apart - offset).abs().median()) if is_known else float("nan")
        found[rank] = (found[known][0] + offset, residual)
    rows = [(rank, found[rank][0] / 1000, found[rank][1] / 1000) for rank in ranks]
    return pd.DataFrame(rows, columns=["rank", "offset_ms", "residual_ms"])
