"""Exposed communication: how long compute had nothing to run because a collective was not done, and who was late.

Of each optimizer step of each rank, every moment belongs to one part: compute; exposed communication, where a
collective is under way and no compute; exposed memory copies; idle. Exposed communication is laid to the collective
that was issued first of those under way, since compute needs their results in that order.

A collective can move data only once its last rank has arrived. So its time on a rank is split there: *wait* until the
last rank's arrival, then *transfer*. Ranks' collectives are matched by their place in the order of issue. Clocks of
different hosts differ, but collectives in which everybody needs everybody's data end on all ranks at about the same
moment; the median difference of their ends is taken for the clocks', where it is larger than its own spread.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.columns import COLLECTIVE_COLUMNS, EXPOSURE_COLUMNS
from analysis.intervals import Intervals, clip, common, length, minus, union
from analysis.timeline import RankTimeline

ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


@dataclass(frozen=True)
class Exposure:
    """Times in ms.

    Attributes:
        steps: A row a rank and step (`EXPOSURE_COLUMNS`); the parts add up to the step.
        collectives: A row a rank and collective (`COLLECTIVE_COLUMNS`).
        clocks: A row a rank: rank, offset_ms (of its clock from the first rank's, taken off), residual_ms (half of the
            collectives end within this of each other after that).
    """

    steps: pd.DataFrame
    collectives: pd.DataFrame
    clocks: pd.DataFrame


def exposure(timelines: list[RankTimeline], is_complete: bool = True) -> Exposure:
    """Match, align and split the collectives of a window; where ranks are missing, nobody knows who was last."""
    calls = pd.concat([_numbered(timeline) for timeline in timelines], ignore_index=True)
    clocks = clock_offsets(calls, [timeline.rank for timeline in timelines])
    offset = calls["rank"].map(clocks.set_index("rank")["offset_ms"]) * 1000
    arrival = calls["start"] - offset
    together = arrival.groupby([calls["step"], calls["sequence"]])
    calls["last_arrival"] = together.transform("max") + offset
    is_matched = together.transform("size") == len(timelines)
    same_kind = calls.groupby(["step", "sequence"])["kind"].transform("nunique") == 1
    calls.loc[~(is_matched & same_kind & is_complete), "last_arrival"] = np.nan
    latest = arrival.loc[together.idxmax()]
    late = pd.Series(calls.loc[latest.index, "rank"].to_numpy(), pd.MultiIndex.from_frame(calls.loc[latest.index, KEY]))
    calls["late_rank"] = late.reindex(pd.MultiIndex.from_frame(calls[KEY])).to_numpy()
    calls["lateness"] = together.transform("max") - together.transform("median")
    tables = [_split(timeline, calls[calls["rank"] == timeline.rank]) for timeline in timelines]
    return Exposure(
        steps=pd.concat([steps for steps, _ in tables], ignore_index=True),
        collectives=pd.concat([collectives for _, collectives in tables], ignore_index=True),
        clocks=clocks,
    )


KEY = ["step", "sequence"]


def _numbered(timeline: RankTimeline) -> pd.DataFrame:
    """A rank's collectives with columns rank, step and sequence: their place in the order of issue in the step."""
    calls = timeline.collectives_by_step().assign(rank=timeline.rank)
    return calls.assign(sequence=calls.groupby("step").cumcount())


def clock_offsets(calls: pd.DataFrame, ranks: list[int]) -> pd.DataFrame:
    """Columns rank, offset_ms, residual_ms, from the ends of collectives (columns rank, step, sequence, kind, end)."""
    ends = calls[calls["kind"].isin(ENDS_TOGETHER)].pivot_table(index=KEY, columns="rank", values="end")
    rows = []
    for rank in ranks:
        apart = (ends[rank] - ends[ranks[0]]).dropna() if {rank, ranks[0]} <= set(ends.columns) else pd.Series([0.0])
        offset = float(apart.median()) if len(apart) else 0.0
        spread = float((apart - offset).abs().median()) if len(apart) else 0.0
        if abs(offset) <= 3 * spread:  # no more than ends differ anyway
            offset = 0.0
        rows.append((rank, offset / 1000, float((apart - offset).abs().median()) / 1000 if len(apart) else 0.0))
    return pd.DataFrame(rows, columns=["rank", "offset_ms", "residual_ms"])


def _split(timeline: RankTimeline, calls: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables `steps` and `collectives` of one rank."""
    compute = union(timeline.intervals("compute"))
    spans = np.concatenate([timeline.intervals("communication"), calls[["start", "end"]].to_numpy(float)])
    exposed = minus(union(spans), compute)
    copies = minus(minus(union(timeline.intervals("memory")), compute), exposed)
    left, waits, rows = exposed, [np.empty((0, 2))], []
    backward_ends = _backward_ends(timeline)
    calls_in_order: list[Any] = list(calls.itertuples())
    for call in calls_in_order:
        own = common(left, np.array([[call.start, call.end]]))
        arrived = np.clip(call.last_arrival, call.start, call.end)  # NaN stays NaN
        waits.append(clip(own, -np.inf, arrived) if np.isfinite(arrived) else np.empty((0, 2)))
        left = minus(left, own)
        rows.append(_collective_row(call, arrived, length(own), length(waits[-1]), backward_ends))
    waited = union(np.concatenate(waits))
    steps = [_step_row(timeline.rank, step, compute, exposed, waited, copies) for step in timeline.steps.itertuples()]
    return pd.DataFrame(steps, columns=list(EXPOSURE_COLUMNS)), pd.DataFrame(rows, columns=list(COLLECTIVE_COLUMNS))


def _backward_ends(timeline: RankTimeline) -> dict[int, float]:
    """By step, when its last backward pass ended on the training thread."""
    backward = timeline.phases[timeline.phases["name"] == "backward"]
    steps: list[Any] = list(timeline.steps.itertuples())
    inside = {step.number: backward[backward["start"].between(step.start, step.end)] for step in steps}
    return {number: float(rows["end"].max()) for number, rows in inside.items()}


def _collective_row(
    call: Any, arrived: float, exposed: float, waited: float, backward_ends: dict[int, float]
) -> tuple[object, ...]:
    duration = call.end - call.start
    transfer = call.end - arrived
    algbw = call.bytes / transfer / 1000 if transfer > 0 else np.nan  # bytes a us are MB/s
    return (
        call.rank,
        call.step,
        call.sequence,
        call.kind,
        call.bytes,
        (call.start - backward_ends[call.step]) / 1000,
        duration / 1000,
        (arrived - call.start) / 1000,
        transfer / 1000,
        exposed / 1000,
        waited / 1000,
        call.late_rank,
        call.lateness / 1000,
        algbw,
        algbw * bus_factor(call.kind, call.group_size),
    )


def bus_factor(kind: str, ranks: float | None) -> float:
    """Busbw over algbw (nccl-tests, doc/PERFORMANCE.md); NaN where the group's size is unknown."""
    others = (ranks - 1) / ranks if ranks else float("nan")
    return {"all_reduce": 2 * others, "broadcast": 1.0, "reduce": 1.0}.get(kind, others)


def _step_row(
    rank: int, step: Any, compute: Intervals, exposed: Intervals, waits: Intervals, copies: Intervals
) -> tuple[float, ...]:
    whole = step.end - step.start
    parts = [length(clip(part, step.start, step.end)) for part in (compute, waits, exposed, copies)]
    parts[2] -= parts[1]
    return (rank, step.number, whole / 1000, *(part / 1000 for part in parts), (whole - sum(parts)) / 1000)
