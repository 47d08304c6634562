"""One rank's trace as a table of what ran where and when, the same for CPU and GPU traces."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.collectives import device_collectives, gloo_collectives, only_group
from analysis.errors import TraceError
from analysis.intervals import Intervals
from analysis.lowering import lower_cpu_events

STEP_PREFIX = "ProfilerStep#"
PHASES = ("forward", "backward", "gradient_sync", "optimizer")
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")
EVENT_COLUMNS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")


@dataclass(frozen=True)
class RankTimeline:
    """What one rank did during a window. All times are in microseconds on the rank's own clock.

    Attributes:
        kind: `cpu` (operators and Gloo spans, lowered to kernels) or `cuda` (device kernels as recorded).
        steps: Columns number, start, end: the analysed optimizer steps.
        phases: Columns name, start, end: forward, backward, gradient_sync, optimizer.
        kernels: Columns lane (`compute`, `communication`, `memory`), stream, name, start, end, launch (the moment at
            which the host issued it).
        collectives: Columns kind, start, end, bytes (NaN if unknown), group (empty if unknown), group_size (the same),
            dtype, stream, issued.
    """

    rank: int
    world_size: int | None
    backend: str
    kind: str
    path: Path
    steps: pd.DataFrame
    phases: pd.DataFrame
    kernels: pd.DataFrame
    collectives: pd.DataFrame

    def intervals(self, lane: str) -> Intervals:
        chosen = self.kernels[self.kernels["lane"] == lane]
        return chosen[["start", "end"]].to_numpy(dtype=np.float64)

    def collectives_by_step(self) -> pd.DataFrame:
        """`collectives` in the order of issue, with a column step: the number of that in which each was issued."""
        calls = self.collectives.sort_values("issued", kind="stable")
        place = np.searchsorted(self.steps["start"].to_numpy(), calls["issued"].to_numpy(), side="right") - 1
        return calls.assign(step=self.steps["number"].to_numpy()[place])


def build_timeline(trace: dict[str, Any], rank: int, path: Path, include_last_step: bool) -> RankTimeline:
    """The timeline of one rank.

    Args:
        trace: Content of the trace file.
        include_last_step: Analyse the last profiled step too; without it, work launched there does not count, since
            its end may have been cut off. A trace of one step is analysed whole.

    Raises:
        TraceError: no ProfilerStep, or nothing ran in the analysed steps.
    """
    events = complete_events(trace, path)
    steps = profiler_steps(events, path)
    if not include_last_step and len(steps) > 1:
        steps = steps.iloc[:-1]
    info = trace.get("distributedInfo") or {}
    world_size = info.get("world_size")
    on_device = events["cat"].isin(DEVICE_CATEGORIES)
    kind = "cuda" if on_device.any() else "cpu"
    kernels = _device_kernels(events, on_device) if kind == "cuda" else lower_cpu_events(events, steps)
    kernels = kernels[kernels["launch"].between(steps["start"].iloc[0], steps["end"].iloc[-1])]
    if kernels.empty:
        raise TraceError(f"{path}: nothing ran in steps {steps['number'].tolist()}; profile more steps")
    group = only_group(info)
    collectives = gloo_collectives(events, world_size or 1, group)
    if kind == "cuda":
        on_streams = events[on_device].assign(launch=_device_kernels(events, on_device)["launch"])
        collectives = pd.concat([collectives, device_collectives(on_streams, events, group)], ignore_index=True)
    collectives = collectives[collectives["issued"].between(steps["start"].iloc[0], steps["end"].iloc[-1])]
    phases = events[events["name"].isin(PHASES) & (events["cat"] == "user_annotation")]
    return RankTimeline(
        rank=rank,
        world_size=world_size,
        backend=str(info.get("backend", "unknown")),
        kind=kind,
        path=path,
        steps=steps.reset_index(drop=True),
        phases=phases[["name", "start", "end"]].reset_index(drop=True),
        kernels=kernels.reset_index(drop=True),
        collectives=collectives.reset_index(drop=True),
    )


def complete_events(trace: dict[str, Any], path: Path) -> pd.DataFrame:
    """The events with a duration, with columns start and end; those without a sensible time are left out.

    Raises:
        TraceError: there are none.
    """
    chosen = [event for event in trace["traceEvents"] if isinstance(event, dict) and event.get("ph") == "X"]
    frame = pd.DataFrame(chosen, columns=list(EVENT_COLUMNS))
    frame["start"] = pd.to_numeric(frame["ts"], errors="coerce")
    frame["end"] = frame["start"] + pd.to_numeric(frame["dur"], errors="coerce")
    frame = frame[np.isfinite(frame["start"]) & (frame["end"] >= frame["start"])]
    if frame.empty:
        raise TraceError(f"{path}: no event with a duration in it, so there is nothing to analyse")
    for column in ("name", "pid", "tid"):
        frame[column] = frame[column].map(str)
    return frame.drop(columns=["ph", "ts", "dur"]).sort_values("start", kind="stable").reset_index(drop=True)


def profiler_steps(events: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Columns number, start, end, pid, tid of the profiled optimizer steps.

    Raises:
        TraceError: there are none.
    """
    found = events[events["name"].str.startswith(STEP_PREFIX) & (events["cat"] == "user_annotation")].copy()
    found["number"] = pd.to_numeric(found["name"].str.removeprefix(STEP_PREFIX), errors="coerce")
    found = found.dropna(subset=["number"]).sort_values("start")
    if found.empty:
        raise TraceError(f"{path}: no {STEP_PREFIX} in it; call profiler.step() after each optimizer step")
    found["number"] = found["number"].astype(int)
    return found[["number", "start", "end", "pid", "tid"]]


def _device_kernels(events: pd.DataFrame, on_device: pd.Series) -> pd.DataFrame:
    kernels = events[on_device].copy()
    arguments = kernels["args"].map(lambda args: args if isinstance(args, dict) else {})
    kernels["stream"] = arguments.map(lambda args: str(args.get("stream", "?")))
    kernels["correlation"] = arguments.map(lambda args: args.get("correlation", -1))
    runtime = events[events["cat"].isin(("cuda_runtime", "cuda_driver"))]
    launched = {
        args["correlation"]: start
        for args, start in zip(runtime["args"], runtime["start"], strict=True)
        if isinstance(args, dict) and "correlation" in args
    }
    kernels["launch"] = kernels["correlation"].map(launched).astype(float)
    is_nccl = kernels["name"].str.match(r"(?i)^nccl.*kernel")
    is_copy = kernels["cat"].isin(DEVICE_CATEGORIES) & kernels["name"].str.match(r"^(Memcpy|Memset|dma)")
    kernels["lane"] = np.select([is_nccl, is_copy], ["communication", "memory"], default="compute")
    return kernels[["lane", "stream", "name", "start", "end", "launch"]]
