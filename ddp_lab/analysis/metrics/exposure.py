"""Exposed communication: how long a rank computed nothing because a collective was not done, and which rank was late.

Every moment of a rank's optimizer step belongs to one part: compute; exposed communication (a collective runs and
compute does not); exposed memory copies; idle. If several collectives run, the exposed time counts for the one that was
issued first, since compute needs their results in that order. But messages of a pipeline are posted ahead: they count
where a pass waits for them, and where nothing else runs.

On a CPU a step is the host's. On a device it is the time between the ends of the last kernels that two steps launched
(`traces.timeline.device_windows`), since the host runs ahead. Kernels of the next step may run before that, on another
stream: a prefetched all-gather, or compute under the last collective of a step. They count in the step in which they
run, so that hidden communication is hidden wherever it is, and each moment counts once.

A collective can move data only after its last rank has arrived. So its time on a rank is split there: *wait* until the
last rank's arrival, then *transfer*. If the ranks' calls cannot be matched (`traces.matching`), all time is transfer.
A message is waited for while a pass of a pipeline has nothing to do before it comes (`metrics.pipeline`).

Bandwidth belongs to the collective, not to a rank: its payload over the time from the last arrival to the last rank's
end. A rank that only sends may be done earlier, once its data is in the network's buffers. If a rank is done before the
last one arrives, data moved at an unknown time, and no bandwidth is given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddp_lab.analysis.columns import COLUMNS
from ddp_lab.analysis.mesh import Mesh
from ddp_lab.analysis.metrics.dimensions import dimension_steps, dimensions
from ddp_lab.analysis.metrics.pipeline import message_waits
from ddp_lab.analysis.traces.collectives import sent_bytes
from ddp_lab.analysis.traces.intervals import Intervals, clip, length, minus, union, within
from ddp_lab.analysis.traces.matching import ENDS_TOGETHER, KEY, matched_calls
from ddp_lab.analysis.traces.timeline import RankTimeline
from ddp_lab.collectives.kinds import MESSAGE, bus_factor


@dataclass(frozen=True)
class Exposure:
    """Times in ms.

    Attributes:
        steps: A row a rank and step (exposure.csv); the parts add up to the step.
        collectives: A row a rank and collective (collectives.csv).
        dimensions: A row a rank, step and dimension (dimensions.csv); empty without a mesh.
        clocks: A row a rank: rank, offset_ms (of its clock from the first rank's; subtracted), residual_ms (half of the
            collectives then end within this of each other).
    """

    steps: pd.DataFrame
    collectives: pd.DataFrame
    dimensions: pd.DataFrame
    clocks: pd.DataFrame


def exposure(timelines: list[RankTimeline], is_complete: bool = True, mesh: Mesh | None = None) -> Exposure:
    """Match, align and split the collectives of a window. If ranks are missing, the last rank is unknown."""
    calls, clocks = matched_calls(timelines, is_complete)
    calls = calls.assign(**_bandwidths(calls), dimension=dimensions(calls["group"], mesh), sent_bytes=sent_bytes(calls))
    tables = [_split(timeline, calls[calls["rank"] == timeline.rank], mesh) for timeline in timelines]
    steps, collectives, by_dimension = (pd.concat(parts, ignore_index=True) for parts in zip(*tables, strict=True))
    if not is_complete:
        steps[["exposed_wait_ms", "exposed_transfer_ms"]] = np.nan
        by_dimension["exposed_wait_ms"] = np.nan
    return Exposure(steps, collectives, by_dimension, clocks)


def _bandwidths(calls: pd.DataFrame) -> dict[str, pd.Series]:
    """Columns algbw_gbps and busbw_gbps, the same for all ranks of a collective."""
    members = [calls[name] for name in KEY]
    first_done = (calls["end"] - calls["last_arrival"]).groupby(members).transform("min")
    is_known = calls["is_matched"] & (first_done > 0) & (calls["bytes"] > 0) & ~(calls["group_size"] <= 1)
    algbw = (calls["bytes"] / calls["done_after"] / 1000).where(is_known)  # bytes a us are MB/s
    factors = [bus_factor(kind, ranks) for kind, ranks in zip(calls["kind"], calls["group_size"], strict=True)]
    return {"algbw_gbps": algbw, "busbw_gbps": algbw * np.array(factors, dtype=float)}


def _split(
    timeline: RankTimeline, calls: pd.DataFrame, mesh: Mesh | None
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The tables `steps`, `collectives` and `dimensions` of one rank; `calls` are in the order of issue."""
    # exposed time
    compute = union(timeline.intervals("compute"))
    spans = calls[["start", "end"]].to_numpy(float)
    exposed = minus(union(np.concatenate([timeline.intervals("communication"), spans])), compute)
    copies = minus(minus(union(timeline.intervals("memory")), compute), exposed)
    # the call that each piece of it counts for, and whether the call waited
    wait_ends = calls["last_arrival"].fillna(calls["start"]).clip(calls["start"], calls["end"])
    messages = message_waits(timeline)
    posted_ahead = (calls["kind"] == MESSAGE).to_numpy()
    cells, owner = _attribute(exposed, spans, wait_ends.to_numpy(float), posted_ahead, messages)
    us = cells[:, 1] - cells[:, 0]
    waits = (owner >= 0) & (cells[:, 1] <= np.append(wait_ends.to_numpy(float), -np.inf)[owner])
    exposed_us, waited_us = (
        np.bincount(owner[chosen], us[chosen], minlength=len(calls)) for chosen in (owner >= 0, waits)
    )
    waits |= within(cells[:, 0], messages)
    # a row a call
    begun = np.sort(timeline.intervals("compute")[:, 0])
    starts_within = np.searchsorted(begun, spans[:, 1]) - np.searchsorted(begun, spans[:, 0], "right")
    is_matched = calls["is_matched"]
    in_us = {
        "after_backward_ms": calls["start"] - calls["step"].map(_backward_ends(timeline)),
        "duration_ms": calls["end"] - calls["start"],
        "wait_ms": (wait_ends - calls["start"]).where(is_matched),
        "transfer_ms": (calls["end"] - wait_ends).where(is_matched),
        "exposed_ms": pd.Series(exposed_us, calls.index),
        "exposed_wait_ms": pd.Series(waited_us, calls.index).where(is_matched),
        "lateness_ms": calls["lateness"],
        "done_after_ms": calls["done_after"],
    }
    in_ms = {name: values / 1000 for name, values in in_us.items()}
    collectives = calls.assign(**in_ms, compute_starts=starts_within)[list(COLUMNS["collectives"])]
    # a row a step
    parts = {"compute_ms": compute, "exposed_ms": exposed, "exposed_copy_ms": copies}
    parts |= {"exposed_wait_ms": union(cells[waits]), "exposed_transfer_ms": union(cells[~waits])}
    steps = pd.DataFrame({"rank": timeline.rank, "step": timeline.steps["number"]})
    steps["step_ms"] = (timeline.windows[:, 1] - timeline.windows[:, 0]) / 1000
    for name, part in parts.items():
        steps[name] = [length(clip(part, start, end)) / 1000 for start, end in timeline.windows]
    steps["idle_ms"] = steps["step_ms"] - steps[["compute_ms", "exposed_ms", "exposed_copy_ms"]].sum(axis="columns")
    if timeline.hides_communication and calls.empty:
        steps[["exposed_ms", "exposed_wait_ms", "exposed_transfer_ms", "idle_ms"]] = np.nan
    by_dimension = pd.DataFrame(columns=list(COLUMNS["dimensions"]))
    if mesh is not None:
        by_dimension = dimension_steps(timeline, calls, compute, (cells, owner, waits), mesh)
    return steps[list(COLUMNS["exposure"])], collectives, by_dimension


def _attribute(
    exposed: Intervals,
    calls: Intervals,
    wait_ends: NDArray[np.float64],
    posted_ahead: NDArray[np.bool_],
    awaited: Intervals,
) -> tuple[Intervals, NDArray[np.int64]]:
    """Exposed time cut where a call begins, ends, or has its last rank; and the call that each piece counts for.

    Args:
        posted_ahead: Which calls are messages.
        awaited: When a pass waits for a message.

    Returns:
        Pieces of shape (n, 2), and for each the index of the running call for which it counts, or -1.
    """
    edges = np.unique(np.concatenate([exposed.ravel(), calls.ravel(), wait_ends, awaited.ravel()]))
    cells = np.column_stack([edges[:-1], edges[1:]])
    messages, collectives = np.full((2, len(cells)), -1)
    for index in range(len(calls) - 1, -1, -1):  # backwards, so that the first issued wins
        first, last = np.searchsorted(edges, calls[index])
        (messages if posted_ahead[index] else collectives)[first:last] = index
    counts_for_message = (collectives < 0) | (within(cells[:, 0], awaited) & (messages >= 0))
    owner = np.where(counts_for_message, messages, collectives)
    is_exposed = within(cells[:, 0], exposed)
    return cells[is_exposed], owner[is_exposed]


def _backward_ends(timeline: RankTimeline) -> dict[int, float]:
    """By step, when its last backward pass ended.

    On a device that is the end of the last compute kernel that backward launched: the host is done long before.
    """
    backward = timeline.phases[timeline.phases["name"] == "backward"]
    compute = timeline.kernels[timeline.kernels["lane"] == "compute"]
    ends = {}
    for number, start, end in timeline.steps[["number", "start", "end"]].to_numpy():
        passes = backward[backward["start"].between(start, end)]
        ends[int(number)] = float(passes["end"].max())
        if timeline.kind == "cuda" and len(passes):
            launched = compute[compute["launch"].between(passes["start"].min(), passes["end"].max())]
            if len(launched):
                ends[int(number)] = float(launched["end"].max())
    return ends


UNLIKE = 2.0
"""If step times of ranks differ by more than this factor, a clock or a unit is wrong."""
UNSURE = 0.05
"""Share of a step that the residual of a clock may have."""


def disagreements(timelines: Sequence[RankTimeline], exposure: Exposure) -> Iterator[str]:
    """A sentence for each way in which the ranks of a complete window do not fit together."""
    steps, calls, clocks = exposure.steps, exposure.collectives, exposure.clocks
    means = steps.groupby("rank")["step_ms"].mean()
    if means.max() > UNLIKE * means.min():
        yield (
            f"steps of rank {means.idxmax()} last {means.max():.3f} ms, of rank {means.idxmin()} {means.min():.3f} ms, "
            "though ranks step together: one has its times in another unit, or a wrong clock"
        )
    issued = pd.concat([timeline.collectives[["group", "group_size"]] for timeline in timelines])
    of_several = set(issued.loc[issued["group_size"] > 1, "group"]) - {""}
    shared = calls[(calls["kind"] != MESSAGE) & calls["group"].isin(of_several)]
    unlike = shared[shared["wait_ms"].isna()]
    if len(unlike):
        counts = unlike.groupby("rank").size().reindex(sorted(steps["rank"].unique()), fill_value=0)
        unmatched = ", ".join(f"{count} of rank {rank}" for rank, count in list(counts.items())[:8])
        yield (
            f"ranks differ in number, kind or size of collectives ({unmatched} have no counterpart), so how long these "
            "waited, and for whom, is unknown"
        )
    if timelines[0].kind == "cpu":  # on a busy machine a rank may lose its core for as long as a step
        return
    early = shared[shared["kind"].isin(ENDS_TOGETHER) & (shared["transfer_ms"] <= 0)]
    if len(early):
        ranks = ", ".join(map(str, sorted(early["rank"].unique())[:8]))
        yield (
            f"collectives of rank {ranks} end before the last rank comes to them ({len(early)}), which cannot be: "
            "clocks or times are wrong, and with them waiting and bandwidth"
        )
    unsure = clocks[clocks["residual_ms"] > UNSURE * means.mean()]
    for rank, residual in unsure[["rank", "residual_ms"]].to_numpy()[:1]:
        yield (
            f"the clock of rank {rank:.0f} cannot be aligned with the first's: the same collectives end "
            f"{residual:.3f} ms apart, so waiting and lateness are no better known than that"
        )
