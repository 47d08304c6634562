"""Lowering: a CPU trace rewritten as if a device had run it, so that one analysis serves both.

HTA looks at device streams, of which a Gloo run on CPU has none. So the training thread's outermost compute operators
become kernels on one virtual stream, and each `gloo:*` span becomes a communication kernel on a virtual stream of the
Gloo thread that ran it. What the training thread spends blocked in a collective is no operator, and so no compute.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

GLOO_PREFIX = "gloo:"
COMPUTE_OPERATOR = re.compile(r"^(?!c10d|_c10d|autograd|profiler|record_)\w+::(?!distributed|autograd)")
"""Operators with a namespace (`aten::mm`), but not those that only wrap others or issue communication."""
COMPUTE_STREAM = "compute"
HTA_COLLECTIVE = re.compile(r"^nccl.*Kernel")


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


def write_for_hta(path: Path, rank: int, steps: pd.DataFrame, kernels: pd.DataFrame) -> None:
    """Write kernels as a trace of a GPU that holds nothing else, which HTA reads in a fraction of the time.

    HTA keeps a kernel only if a launch with the same correlation lies within the steps; and it leaves out the last
    step, so an empty one is added after those that are analysed.
    """
    end = float(steps["end"].iloc[-1])
    boundaries = [*zip(steps["number"], steps["start"], steps["end"], strict=True)]
    boundaries.append((int(steps["number"].iloc[-1]) + 1, end, end + 2))
    events = [
        _event("user_annotation", f"ProfilerStep#{number}", start, stop - start, 1)
        for number, start, stop in boundaries
    ]
    names = kernels["name"].where(kernels["lane"] != "communication", kernels["name"].map(name_for_hta))
    streams, _ = pd.factorize(kernels["stream"], sort=True)
    launches = kernels["launch"].clip(upper=end - 1)
    columns = (names, streams + FIRST_STREAM, kernels["start"], kernels["end"] - kernels["start"], launches)
    for index, (name, stream, start, duration, launch) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        link = {"correlation": index + 1, "stream": stream}
        events.append(_event("kernel", name, start, duration, stream, link))
        events.append(_event("cuda_runtime", "cudaLaunchKernel", launch, 1.0, 1, {"correlation": index + 1}))
    path.write_bytes(msgspec.json.encode({"distributedInfo": {"rank": rank}, "traceEvents": events}))


FIRST_STREAM = 7


def name_for_hta(name: str) -> str:
    """A collective's name as HTA knows it for one."""
    return name if HTA_COLLECTIVE.match(name) else "ncclDevKernel_" + name.removeprefix(GLOO_PREFIX)


def _event(
    category: str, name: str, start: float, duration: float, tid: int, args: dict[str, int] | None = None
) -> dict[str, Any]:
    event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, "ts": start, "dur": duration}
    return {**event, "args": args or {}}
