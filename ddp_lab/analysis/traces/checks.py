"""What is wrong with the times of a trace, and what that does to the figures.

Each trace is checked once, when its timeline is built. Impossible events are left out or repaired, and a sentence says
so. A kernel that the profiler lost together with its launch leaves no sign, nor does one that it recorded too short.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

EARLY_US = 100.0
"""A kernel may begin this long before its launch, or before an earlier kernel: clocks of device and host differ."""
GAP = 0.1
"""Share of a step by which the time between two steps may exceed the usual time, which is the profiler's own work."""
OVERLAP = 0.01
"""Share of a stream's busy time in which kernels may overlap: dependent launches do."""


def with_launches(events: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """`events` with a launch for each kernel that lost it: that of the last kernel that began before it."""
    lost = events["is_unlaunched"].to_numpy()
    if not lost.any():
        return events, []
    launched = events[events["launch"].notna()]
    starts = events.loc[lost, "start"].to_numpy()
    place = np.searchsorted(launched["start"].to_numpy(), starts, side="right") - 1
    launches = np.append(launched["launch"].to_numpy(), np.nan)[place]
    mended = events.copy()
    mended.loc[lost, "launch"] = np.where(place < 0, starts, launches)
    note = f"kernels whose launch is missing ({lost.sum()}) count in the step in which they began to run"
    return mended, [note]


def without_early(events: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """`events` without kernels that begin before their launch. If most do, the device's clock is behind: it is set."""
    by_us = (events["launch"] - events["start"]).to_numpy()
    count = int((by_us > EARLY_US).sum())
    if not count:
        return events, []
    if 2 * count <= events["launch"].notna().sum():
        note = f"kernels that begin before they were launched are left out ({count}), so busy time lacks theirs"
        return events[~(by_us > EARLY_US)], [note]
    behind_us, mended = np.nanmax(by_us), events.copy()
    mended.loc[events["stream"] != "", ["start", "end"]] += behind_us
    note = (
        f"the device's clock is {behind_us / 1000:.3f} ms or more behind the host's: what ran there counts that later"
    )
    return mended.sort_values("start", kind="stable"), [note]


def of_timeline(kernels: pd.DataFrame, steps: pd.DataFrame, operators: pd.DataFrame) -> Iterator[str]:
    """A sentence for each thing that is wrong with the times of one rank.

    Args:
        kernels: As in a timeline.
        steps: All profiled ones, with the column number.
        operators: Of the training thread on the host, which nest; empty if a device ran.
    """
    # kernels that overlap, overtake or last no time
    for stream, ran in kernels.sort_values("start", kind="stable").groupby("stream"):
        furthest = np.maximum.accumulate(ran["end"].to_numpy())[:-1]
        over = np.minimum(furthest, ran["end"].to_numpy()[1:]) - ran["start"].to_numpy()[1:]
        of_one_graph = ran["launch"].to_numpy()[1:] == ran["launch"].to_numpy()[:-1]
        over = np.where(of_one_graph, 0, over.clip(0))
        if over.sum() > OVERLAP * (ran["end"] - ran["start"]).sum():
            yield (
                f"kernels of stream {stream} overlap ({(over > 0).sum()} times, by {over.sum() / 1000:.3f} ms in all), "
                "which one stream cannot: their times add up to more than its busy time"
            )
        launched = ran.dropna(subset=["launch"]).sort_values(["launch", "start"], kind="stable")
        overtaken = int((np.diff(launched["start"]) < -EARLY_US).sum())
        if overtaken:
            yield (
                f"kernels of stream {stream} ran before some that were launched earlier ({overtaken} times): times are "
                "wrong, and with them the busy and idle time of steps"
            )
    instant = int((kernels["end"] <= kernels["start"]).sum())
    if instant:
        yield f"kernels that last no time are in the trace ({instant}), so busy time lacks theirs"
    # operators that do not nest
    ordered = operators.sort_values(["start", "end"], ascending=[True, False], kind="stable")
    furthest = np.maximum.accumulate(ordered["end"].to_numpy())[:-1]
    crossed = (ordered["start"].to_numpy()[1:] < furthest - 1) & (ordered["end"].to_numpy()[1:] > furthest + 1)
    if crossed.any():
        yield f"operators of one thread overlap without nesting ({crossed.sum()}), so compute lacks some of their time"
    # steps that are missing, and time between steps
    numbers, starts, ends = (steps[name].to_numpy() for name in ("number", "start", "end"))
    if (np.diff(numbers) != 1).any():
        yield f"its steps are {', '.join(map(str, numbers[:12]))}: what ran between them counts in the step before"
    between = np.where(np.diff(numbers) == 1, starts[1:] - ends[:-1], 0)
    usual = np.median([*between, 0])
    if between.max(initial=0) - usual > GAP * (ends - starts).mean():
        yield (
            f"{between.max() / 1000:.3f} ms between steps {numbers[between.argmax()]} and "
            f"{numbers[between.argmax() + 1]} are of no step, more than between others, so figures lack what ran there"
        )
