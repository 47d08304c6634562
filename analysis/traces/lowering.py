"""Lowering: a CPU trace rewritten as if a device had run it, so that one analysis serves both.

HTA looks at device streams, of which a Gloo run on CPU has none. So the training thread's outermost compute operators
become kernels on one virtual stream, and each `gloo:*` span becomes a communication kernel on a virtual stream of the
Gloo thread that ran it. What the training thread spends blocked in a collective is no operator, and so no compute.
"""

import re

import numpy as np
import pandas as pd

GLOO_PREFIX = "gloo:"
COMPUTE_OPERATOR = re.compile(r"^(?!c10d|_c10d|autograd|profiler|record_)\w+::(?!distributed|autograd)")
"""Operators with a namespace (`aten::mm`), but not those that only wrap others or issue communication."""
COMPUTE_STREAM = "compute"


def lower_cpu_events(events: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Kernels (columns lane, stream, name, start, end, launch) of a trace without a device.

    Args:
        events: Complete events in order of start (`reading.RankTrace`).
        steps: Their columns pid and tid say which thread trains.
    """
    training_thread = (events["pid"] == steps["pid"].iloc[0]) & (events["tid"] == steps["tid"].iloc[0])
    operators = events[(events["cat"] == "cpu_op") & training_thread & events["name"].str.match(COMPUTE_OPERATOR)]
    compute = outermost(operators).assign(lane="compute", stream=COMPUTE_STREAM)
    compute["launch"] = compute["start"]
    spans = events[events["name"].str.startswith(GLOO_PREFIX)]
    communication = spans.assign(lane="communication", stream="gloo " + spans["tid"].astype(str), launch=spans["start"])
    columns = ["lane", "stream", "name", "start", "end", "launch"]
    return pd.concat([compute[columns], communication[columns]], ignore_index=True)


def outermost(events: pd.DataFrame) -> pd.DataFrame:
    """Those of `events` (one thread's, properly nested) that lie in no other."""
    ordered = events.sort_values(["start", "end"], ascending=[True, False], kind="stable")
    ends = ordered["end"].to_numpy()
    furthest_before = np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    return ordered[ordered["start"].to_numpy() >= furthest_before]
