"""Whether the ranks of a window fit together: what they issued, how long they stepped, and their clocks."""

from collections.abc import Iterator, Sequence

import pandas as pd

from ddp_lab.analysis.metrics.exposure import Exposure
from ddp_lab.analysis.traces.matching import ENDS_TOGETHER
from ddp_lab.analysis.traces.timeline import RankTimeline

UNLIKE = 2.0
"""Ranks of one job whose steps differ by this factor have other clocks."""
UNSURE = 0.05
"""Share of a step by which clocks may be unsure."""


def disagreements(timelines: Sequence[RankTimeline], exposure: Exposure) -> Iterator[str]:
    """A sentence for each way in which the ranks of a complete window do not fit together."""
    steps, calls, clocks = exposure.steps, exposure.collectives, exposure.clocks
    lasts = steps.groupby("rank")["step_ms"].mean()
    if lasts.max() > UNLIKE * lasts.min():
        yield (
            f"steps of rank {lasts.idxmax()} last {lasts.max():.3f} ms, of rank {lasts.idxmin()} {lasts.min():.3f} ms, "
            "though ranks step together: one has its times in another unit, or a wrong clock"
        )
    issued = pd.concat([timeline.collectives[["group", "group_size"]] for timeline in timelines])
    of_several = set(issued.loc[issued["group_size"] > 1, "group"]) - {""}
    shared = calls[(calls["kind"] != "send_recv") & calls["group"].isin(of_several)]
    unlike = shared[shared["wait_ms"].isna()]
    if len(unlike):
        counts = unlike.groupby("rank").size().reindex(sorted(steps["rank"].unique()), fill_value=0)
        each = ", ".join(f"{count} of rank {rank}" for rank, count in list(counts.items())[:8])
        yield (
            f"ranks differ in number, kind or size of collectives ({each} have no counterpart), so how long these "
            "waited, and for whom, is unknown"
        )
    if timelines[0].kind == "cpu":  # a busy machine may take a rank's core for as long as a step, beside any record
        return
    early = shared[shared["kind"].isin(ENDS_TOGETHER) & (shared["transfer_ms"] <= 0)]
    if len(early):
        ranks = ", ".join(map(str, sorted(early["rank"].unique())[:8]))
        yield (
            f"collectives of rank {ranks} end before the last rank comes to them ({len(early)}), which cannot be: "
            "clocks or times are wrong, and with them waiting and bandwidth"
        )
    unsure = clocks[clocks["residual_ms"] > UNSURE * lasts.mean()]
    for rank, residual in unsure[["rank", "residual_ms"]].to_numpy()[:1]:
        yield (
            f"the clock of rank {rank:.0f} cannot be aligned with the first's: the same collectives end "
            f"{residual:.3f} ms apart, so waiting and lateness are no better known than that"
        )
