"""The figures of Holistic Trace Analysis (HTA), over the kernels of GPU traces and of lowered CPU traces.

HTA gets the kernels that were read already, in the form in which it keeps a loaded trace. Its own reader would take
several times as long as all other work, since it parses every event with all arguments.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ddp_lab.analysis.traces.timeline import RankTimeline
from ddp_lab.runtime.errors import UserError

HTA_NAMES = {"compute": "gemm", "communication": "ncclDevKernel", "memory": "Memcpy"}
"""Kernel names that HTA takes for each lane. It goes by names alone, and takes RCCL's `mscclKernel` for compute."""
NS = 1000
"""HTA computes in whole numbers: microseconds when it reads a file. Here it gets nanoseconds, so nothing is rounded."""


def holistic_figures(timelines: Sequence[RankTimeline]) -> pd.DataFrame:
    """What HTA says of the kernels that the analysed steps launched.

    Returns:
        A row a rank: rank, compute_us, non_compute_us (exposed communication and, on CUDA, exposed memory copies),
        idle_us, total_us (first kernel's start to last kernel's end), overlap_pct (share of communication time in which
        compute ran as well; NaN without communication).

    Raises:
        UserError: HTA cannot analyse them.
    """
    logging.disable(logging.WARNING)  # HTA reports its progress as warnings
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis
    from hta.analyzers.communication_analysis import CommunicationAnalysis
    from hta.common.trace import Trace

    trace = Trace({}, "")
    try:
        for timeline in timelines:
            trace.traces[timeline.rank] = table_for_hta(timeline, trace.symbol_table)
        with np.errstate(invalid="ignore"):  # a rank without communication has no overlap
            overlap = CommunicationAnalysis.get_comm_comp_overlap(trace, visualize=False)
        breakdown = BreakdownAnalysis.get_temporal_breakdown(trace, visualize=False)
    except (ValueError, KeyError, IndexError, AssertionError, TypeError, ArithmeticError) as error:
        raise UserError(f"{timelines[0].path}: HTA cannot analyse these traces ({error!r})") from error
    times = {f"{part}_us": breakdown[f"{part}_time(us)"] / NS for part in ("compute", "non_compute", "idle")}
    figures = pd.DataFrame({"rank": breakdown["rank"], **times, "total_us": breakdown["kernel_time(us)"] / NS})
    return figures.merge(overlap.rename(columns={"comp_comm_overlap_pctg": "overlap_pct"}), on="rank")


def table_for_hta(timeline: RankTimeline, symbols: Any) -> pd.DataFrame:
    """A rank's kernels as HTA's own reader leaves them; times in whole nanoseconds since the first step.

    Args:
        symbols: HTA's table of names. `HTA_NAMES` are added to it.
    """
    kernels, origin = timeline.issued_kernels(), float(timeline.steps["start"].iloc[0])
    symbols.add_symbols(list(HTA_NAMES.values()))
    start, end = (((kernels[side] - origin) * NS).round().astype("int64") for side in ("start", "end"))
    streams, _ = pd.factorize(kernels["stream"], sort=True)
    ids = kernels["lane"].map(HTA_NAMES).map(symbols.get_sym_id_map())
    return pd.DataFrame({"ts": start, "dur": end - start, "end": end, "stream": streams + 1, "name": ids})
