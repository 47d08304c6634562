"""The figures that Holistic Trace Analysis (HTA) computes, over the kernels of GPU traces and of lowered CPU traces."""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.errors import TraceError
from analysis.lowering import write_for_hta
from analysis.timeline import RankTimeline

ALL_KERNELS = 10**9
"""HTA lumps kernels past this number into `others`, and then gives sums in the columns of means and maxima."""


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


def holistic_figures(timelines: Sequence[RankTimeline], multiprocessing: bool) -> HolisticFigures:
    """Run HTA over one window: over its kernels in the analysed steps and their launches, which is all that it needs.

    Raises:
        TraceError: HTA cannot read the traces.
    """
    with tempfile.TemporaryDirectory(prefix="lowered-traces-") as folder:
        files: dict[int, str] = {}
        for timeline in timelines:
            path = Path(folder) / f"rank_{timeline.rank}.json"
            write_for_hta(path, timeline.rank, timeline.steps, timeline.kernels)
            files[timeline.rank] = str(path)
        try:
            return _run_hta(files, multiprocessing)
        except (ValueError, KeyError, IndexError, AssertionError, TypeError, ArithmeticError) as error:
            raise TraceError(f"{timelines[0].path}: HTA cannot analyse these traces ({error!r})") from error


def _run_hta(files: dict[int, str], multiprocessing: bool) -> HolisticFigures:
    logging.disable(logging.WARNING)  # HTA reports its progress as warnings
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis
    from hta.analyzers.communication_analysis import CommunicationAnalysis
    from hta.common.trace import Trace

    trace = Trace(files, "")
    trace.load_traces(include_last_profiler_step=False, use_multiprocessing=multiprocessing, use_memory_profiling=False)
    with np.errstate(invalid="ignore"):
        overlap = CommunicationAnalysis.get_comm_comp_overlap(trace, visualize=False)
    breakdown = BreakdownAnalysis.get_temporal_breakdown(trace, visualize=False)
    _, kernels = BreakdownAnalysis.get_gpu_kernel_breakdown(
        trace, visualize=False, duration_ratio=1.0, num_kernels=ALL_KERNELS, include_memory_kernels=True
    )
    return HolisticFigures(
        breakdown=breakdown.rename(
            columns={
                "compute_time(us)": "compute_us",
                "non_compute_time(us)": "non_compute_us",
                "idle_time(us)": "idle_us",
                "kernel_time(us)": "total_us",
            }
        )[["rank", "compute_us", "non_compute_us", "idle_us", "total_us"]],
        overlap=overlap.rename(columns={"comp_comm_overlap_pctg": "overlap_pct"}),
        kernels=kernels.rename(columns={"sum (us)": "total_us", "mean (us)": "mean_us", "max (us)": "max_us"})[
            ["rank", "kernel_type", "name", "total_us", "mean_us", "max_us"]
        ],
    )
