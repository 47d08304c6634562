"""One rank's trace as a table of what ran where and when, the same for CPU and GPU traces."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.errors import TraceError
from analysis.traces.collectives import device_collectives, gloo_collectives, only_group
from analysis.traces.intervals import Intervals
from analysis.traces.lowering import lower_cpu_events
from analysis.traces.reading import COLLECTIVE_KERNEL, DEVICE_CATEGORIES, STEP_PREFIX, RankTrace

STEP_NAME = STEP_PREFIX + r"\d{1,15}"
PHASES = ("forward", "backward", "gradient_sync", "optimizer")
CLOCK_STEP_US = 10.0
"""By how much the profiler's rounding may let two steps overlap."""
LONGEST_STEP_US = 86_400e6
MOST_RANKS = 10**6
"""A trace that says that there are more is not believed."""


@dataclass(frozen=True)
class RankTimeline:
    """What one rank did during a window. All times are in microseconds on the rank's own clock.

    Attributes:
        kind: `cpu` (operators and Gloo spans, lowered to kernels) or `cuda` (device kernels as recorded).
        steps: Columns number, start, end: the analysed optimizer steps.
        phases: Columns name, start, end: forward, backward, gradient_sync, optimizer.
        kernels: Columns lane (`compute`, `communication`, `memory`), stream, name, start, end, launch (the moment at
            which the host issued it; NaN if unknown). What the analysed steps issued, and what else ran in them.
        collectives: Columns kind, start, end, bytes (NaN if unknown), group (empty if unknown), group_size (the same),
            dtype, stream, issued.
        left_out: Number of events that had no usable time.
    """

    rank: int
    world_size: int | None
    kind: str
    path: Path
    steps: pd.DataFrame
    phases: pd.DataFrame
    kernels: pd.DataFrame
    collectives: pd.DataFrame
    left_out: int = 0

    def issued_kernels(self) -> pd.DataFrame:
        """Those of `kernels` that the analysed steps issued."""
        return self.kernels[self.kernels["launch"].between(self.steps["start"].iloc[0], self.steps["end"].iloc[-1])]

    def intervals(self, lane: str) -> Intervals:
        chosen = self.kernels[self.kernels["lane"] == lane]
        return chosen[["start", "end"]].to_numpy(dtype=np.float64)

    def collectives_by_step(self) -> pd.DataFrame:
        """`collectives` in the order of issue, with a column step: the number of that in which each was issued."""
        calls = self.collectives.sort_values("issued", kind="stable")
        place = np.searchsorted(self.steps["start"].to_numpy(), calls["issued"].to_numpy(), side="right") - 1
        return calls.assign(step=self.steps["number"].to_numpy()[place])


def build_timeline(trace: RankTrace, rank: int, include_last_step: bool) -> RankTimeline:
    """The timeline of one rank.

    Args:
        include_last_step: Analyse the last profiled step too; without it, work launched there does not count, since
            its end may have been cut off. A trace of one step is analysed whole.

    Raises:
        TraceError: no ProfilerStep, its clock is broken, or nothing ran in the analysed steps.
    """
    path, info = trace.path, trace.info
    steps = profiler_steps(trace.events, path)
    events, absurd = without_absurd(trace.events, steps)
    if not include_last_step and len(steps) > 1:
        steps = steps.iloc[:-1]
    world_size = info.get("world_size")
    world_size = world_size if type(world_size) is int and 0 < world_size <= MOST_RANKS else None
    on_device = events["cat"].isin(DEVICE_CATEGORIES)
    kind = "cuda" if on_device.any() else "cpu"
    kernels = device_kernels(events[on_device]) if kind == "cuda" else lower_cpu_events(events, steps)
    begin, end = steps["start"].iloc[0], steps["end"].iloc[-1]
    issued = kernels["launch"].between(begin, end)
    if not issued.any():
        raise TraceError(f"{path}: nothing ran in steps {steps['number'].tolist()}; profile more steps")
    running = ~(kernels["launch"] > end) & (kernels["start"] < end) & (kernels["end"] > begin)
    group = only_group(info)
    collectives = gloo_collectives(events, world_size or 0, group)
    if kind == "cuda":
        collectives = pd.concat([collectives, device_collectives(events[on_device], events, group)], ignore_index=True)
    collectives = collectives[collectives["issued"].between(begin, end)]
    phases = events[events["name"].isin(PHASES) & (events["cat"] == "user_annotation")]
    return RankTimeline(
        rank=rank,
        world_size=world_size,
        kind=kind,
        path=path,
        steps=steps.reset_index(drop=True),
        phases=phases[["name", "start", "end"]].reset_index(drop=True),
        kernels=kernels[issued | running].reset_index(drop=True),
        collectives=collectives.reset_index(drop=True),
        left_out=trace.left_out + absurd,
    )


def profiler_steps(events: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Columns number, start, end, pid, tid of the profiled optimizer steps, on the thread that has most of them.

    Raises:
        TraceError: there are none, or they cannot have happened as the clock says.
    """
    found = events[(events["cat"] == "user_annotation") & events["name"].str.fullmatch(STEP_NAME)].copy()
    if found.empty:
        raise TraceError(f"{path}: no {STEP_PREFIX} in it; call profiler.step() after each optimizer step")
    found["number"] = found["name"].str.removeprefix(STEP_PREFIX).astype(int)
    threads = found.groupby(["pid", "tid"])["number"].transform("size")
    found = found[threads == threads.max()].sort_values("number", kind="stable")
    found = found[(found["pid"] == found["pid"].iloc[0]) & (found["tid"] == found["tid"].iloc[0])]
    ends, starts = found["end"].to_numpy()[:-1], found["start"].to_numpy()[1:]
    for index in np.flatnonzero(starts < ends - CLOCK_STEP_US):
        first, second = found["number"].iloc[index], found["number"].iloc[index + 1]
        raise TraceError(f"{path}: step {second} begins before step {first} has ended; its clock went back")
    longest = found.loc[(found["end"] - found["start"]).idxmax()]
    if longest["end"] - longest["start"] > LONGEST_STEP_US:
        raise TraceError(f"{path}: step {longest['number']} lasts longer than a day; its clock is broken")
    return found[["number", "start", "end", "pid", "tid"]]


def without_absurd(events: pd.DataFrame, steps: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """`events` without those that last longer than twice the time of all profiled steps, or lie as far from them, and
    how many these are."""
    first, last = steps["start"].min(), steps["end"].max()
    far = 2 * (last - first) + 1e6
    is_near = events["start"].between(first - far, last + far)
    is_sensible = is_near & (events["end"] - events["start"] <= far)
    return events[is_sensible], int((~is_sensible).sum())


def device_kernels(device: pd.DataFrame) -> pd.DataFrame:
    """Columns lane, stream, name, start, end, launch of what ran on the device."""
    is_collective = device["name"].str.match(COLLECTIVE_KERNEL)
    is_copy = device["name"].str.match(r"^(Memcpy|Memset|dma)")
    lane = np.select([is_collective, is_copy], ["communication", "memory"], default="compute")
    return device.assign(lane=lane)[["lane", "stream", "name", "start", "end", "launch"]]
