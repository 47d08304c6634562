"""The profiled optimizer steps: when the host went through them, and when a device worked on them."""

from pathlib import Path

import numpy as np
import pandas as pd

from ddp_lab.analysis.traces.intervals import Intervals
from ddp_lab.analysis.traces.reading import STEP_PREFIX
from ddp_lab.runtime.errors import UserError

STEP_NAME = STEP_PREFIX + r"\d{1,15}"
CLOCK_STEP_US = 10.0
"""By how much the profiler's rounding may let two steps overlap."""
LONGEST_STEP_US = 86_400e6


def profiler_steps(events: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Columns number, start, end, pid, tid of the profiled optimizer steps, on the thread that has most of them.

    Raises:
        UserError: there are none, or their times are impossible.
    """
    found = events[(events["cat"] == "user_annotation") & events["name"].str.fullmatch(STEP_NAME)].copy()
    if found.empty:
        raise UserError(f"{path}: no {STEP_PREFIX} in it; call profiler.step() after each optimizer step")
    found["number"] = found["name"].str.removeprefix(STEP_PREFIX).astype(int)
    threads = found.groupby(["pid", "tid"])["number"].transform("size")
    found = found[threads == threads.max()].sort_values("number", kind="stable")
    found = found[(found["pid"] == found["pid"].iloc[0]) & (found["tid"] == found["tid"].iloc[0])]
    ends, starts = found["end"].to_numpy()[:-1], found["start"].to_numpy()[1:]
    for index in np.flatnonzero(starts < ends - CLOCK_STEP_US):
        first, second = found["number"].iloc[index], found["number"].iloc[index + 1]
        raise UserError(f"{path}: step {second} begins before step {first} has ended; its clock went back")
    longest = found.loc[(found["end"] - found["start"]).idxmax()]
    if longest["end"] - longest["start"] > LONGEST_STEP_US:
        raise UserError(f"{path}: step {longest['number']} lasts longer than a day; its clock is broken")
    return found[["number", "start", "end", "pid", "tid"]]


def host_windows(steps: pd.DataFrame) -> Intervals:
    """Start and end of each step on the host, in us."""
    return steps[["start", "end"]].to_numpy(dtype=np.float64)


def device_windows(kernels: pd.DataFrame, steps: pd.DataFrame) -> Intervals:
    """When a device worked on each step: from the end of the step before to the end of the step's last kernel.

    A kernel belongs to the step that launched it. The host runs ahead: it may be in the next step but one while the
    device works on this one. The windows follow each other without gaps, so each moment counts once. The first begins
    when the kernels of earlier steps are done, but not before the host's step. If a kernel was launched before the
    trace began, its launch is not in it; such kernels come before all others on their stream.

    Args:
        kernels: Columns stream, start, end, launch.
        steps: The host's, in order: columns start, end.
    """
    bounds = host_windows(steps)
    own = kernels["launch"].between(bounds[0, 0], bounds[-1, 1])
    place = np.searchsorted(bounds[:, 0], kernels.loc[own, "launch"].to_numpy(float), side="right") - 1
    ends = np.full(len(bounds), -np.inf)
    np.maximum.at(ends, place, kernels.loc[own, "end"].to_numpy(float))
    first = kernels["stream"].map(kernels[own].groupby("stream")["start"].min())
    earlier = (kernels["launch"] < bounds[0, 0]) | (kernels["launch"].isna() & (kernels["start"] < first))
    begin = max(bounds[0, 0], kernels.loc[earlier, "end"].max()) if earlier.any() else bounds[0, 0]
    edges = np.maximum.accumulate([begin, *ends])
    return np.column_stack([edges[:-1], edges[1:]])
