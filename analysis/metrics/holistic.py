"""The figures that Holistic Trace Analysis (HTA) computes, over the kernels of GPU traces and of lowered CPU traces.

HTA is handed the kernels that were read already, in the form in which it keeps a trace that it has loaded. To let it
load the files would take several times as long as all else, since it parses every event with all of its arguments.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.errors import TraceError
from analysis.traces.lowering import GLOO_PREFIX
from analysis.traces.timeline import RankTimeline

ALL_KERNELS = 10**9
"""HTA lumps kernels past this number into `others`, and then gives sums in the columns of means and maxima."""
HTA_COLLECTIVE = re.compile(r"^nccl.*Kernel")
NS = 1000
"""HTA reckons in whole numbers, which are microseconds in its own files. It gets nanoseconds, so nothing is rounded."""


@dataclass(frozen=True)
class HolisticFigures:
    """What HTA reports for one window.

    Attributes:
        breakdown: A row a rank: rank, compute_us, non_compute_us (exposed communication and, on CUDA, exposed memory
            copies), idle_us, total_us (first kernel's start to last kernel's end).
        overlap: A row a rank: rank, overlap_pct, the share of communication time in which compute ran as well; NaN
            where nothing was communicated.
        kernels: A row a rank and kernel: rank, kernel_type, name, total_us, mean_us, max_us.
    """

    breakdown: pd.DataFrame
    overlap: pd.DataFrame
    kernels: pd.DataFrame


def holistic_figures(timelines: Sequence[RankTimeline]) -> HolisticFigures:
    """Run HTA over one window: over the kernels that were launched in its analysed steps.

    Raises:
        TraceError: HTA cannot analyse them.
    """
    logging.disable(logging.WARNING)  # HTA reports its progress as warnings
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis
    from hta.analyzers.communication_analysis import CommunicationAnalysis
    from hta.common.trace import Trace

    trace = Trace({}, "")
    try:
        for timeline in timelines:
            trace.traces[timeline.rank] = table_for_hta(timeline, trace.symbol_table)
        with np.errstate(invalid="ignore"):  # a rank without communication has none that overlaps
            overlap = CommunicationAnalysis.get_comm_comp_overlap(trace, visualize=False)
        breakdown = BreakdownAnalysis.get_temporal_breakdown(trace, visualize=False)
        _, kernels = BreakdownAnalysis.get_gpu_kernel_breakdown(
            trace, visualize=False, duration_ratio=1.0, num_kernels=ALL_KERNELS, include_memory_kernels=True
        )
    except (ValueError, KeyError, IndexError, AssertionError, TypeError, ArithmeticError) as error:
        raise TraceError(f"{timelines[0].path}: HTA cannot analyse these traces ({error!r})") from error
    times = {f"{part}_time(us)": f"{part}_us" for part in ("compute", "non_compute", "idle")}
    breakdown = breakdown.rename(columns={**times, "kernel_time(us)": "total_us"})
    kernels = kernels.rename(columns={"sum (us)": "total_us", "mean (us)": "mean_us", "max (us)": "max_us"})
    return HolisticFigures(
        breakdown=in_us(breakdown[["rank", "compute_us", "non_compute_us", "idle_us", "total_us"]]),
        overlap=overlap.rename(columns={"comp_comm_overlap_pctg": "overlap_pct"}),
        kernels=in_us(kernels[["rank", "kernel_type", "name", "total_us", "mean_us", "max_us"]]),
    )


def table_for_hta(timeline: RankTimeline, symbols: Any) -> pd.DataFrame:
    """A rank's kernels as HTA's own reader would have left them; times in whole nanoseconds since the first step.

    Args:
        symbols: HTA's table of names, to which the kernels' are added.
    """
    kernels, origin = timeline.issued_kernels(), float(timeline.steps["start"].iloc[0])
    names = kernels["name"].where(kernels["lane"] != "communication", kernels["name"].map(name_for_hta))
    symbols.add_symbols(names.unique())
    start, end = (((kernels[side] - origin) * NS).round().astype("int64") for side in ("start", "end"))
    streams, _ = pd.factorize(kernels["stream"], sort=True)
    ids = names.map(symbols.get_sym_id_map())
    return pd.DataFrame({"ts": start, "dur": end - start, "end": end, "stream": streams + 1, "name": ids})


def name_for_hta(name: str) -> str:
    """A collective's name as HTA knows it for one."""
    return name if HTA_COLLECTIVE.match(name) else "ncclDevKernel_" + name.removeprefix(GLOO_PREFIX)


def in_us(table: pd.DataFrame) -> pd.DataFrame:
    times = [name for name in table.columns if name.endswith("_us")]
    return table.astype(dict.fromkeys(times, float)).assign(**{name: table[name] / NS for name in times})
