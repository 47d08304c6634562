"""One rank's trace as a table of what ran where and when, the same for CPU and GPU traces.

A CPU trace is *lowered*: rewritten as if a device had run it, so that one analysis serves both. HTA looks at device
streams, and a Gloo run on CPU has none. So the training thread's outermost compute operators become kernels on one
virtual stream, and each `gloo:*` span becomes a communication kernel on a virtual stream of its Gloo thread. Time that
the training thread spends blocked in a collective belongs to no operator, so it is not compute.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddp_lab.analysis.traces.checks import of_timeline, with_launches, without_early
from ddp_lab.analysis.traces.collectives import only_group
from ddp_lab.analysis.traces.gloo import GLOO, gloo_collectives
from ddp_lab.analysis.traces.intervals import Intervals
from ddp_lab.analysis.traces.nccl import device_collectives
from ddp_lab.analysis.traces.reading import COLLECTIVE_KERNEL, DEVICE_CATEGORIES, HOST_CALLS, STEP_PREFIX, RankTrace
from ddp_lab.runtime.errors import UserError

STEP_NAME = STEP_PREFIX + r"\d{1,15}"
CLOCK_STEP_US = 10.0
"""By how much the profiler's rounding may let two steps overlap."""
LONGEST_STEP_US = 86_400e6
PHASES = ("forward", "backward", "gradient_sync", "optimizer")
MOST_RANKS = 10**6
"""A world size above this is an error in the trace, and is ignored."""
COMPUTE_OPERATOR = re.compile(
    r"^(CompiledFunction(Backward)?$|(?!c10d|_c10d|autograd|profiler|record_)\w+::(?!distributed|autograd))"
)
"""Operators with a namespace (`aten::mm`), without those that only wrap others or issue communication; and a compiled
graph, whose own kernels a trace does not show."""
KERNEL_COLUMNS = ["lane", "stream", "name", "start", "end", "launch"]


@dataclass(frozen=True)
class RankTimeline:
    """What one rank did during a window. All times are in microseconds on the rank's own clock.

    Attributes:
        kind: `cpu` (operators and Gloo spans, lowered to kernels) or `cuda` (device kernels as recorded).
        steps: Columns number, start, end: the analysed optimizer steps, as the host went through them.
        phases: Columns name, start, end: forward, backward, gradient_sync, optimizer, and actions of a pipeline.
        kernels: Columns lane (`compute`, `communication`, `memory`), stream, name, start, end, launch (the moment at
            which the host issued it; NaN if unknown). All that the analysed steps issued, and all that ran during them.
        collectives: Columns kind, start, end, bytes (NaN if unknown), group (empty if unknown), group_size (the same),
            dtype, stream, issued, made_of (`2 scatters`; empty for calls by themselves).
        notes: A sentence for each thing that is wrong with the trace, and what that does to the figures.
        hides_communication: Ranks communicated, but not in kernels of a device, the only ones that HTA sees.
    """

    rank: int
    world_size: int | None
    kind: str
    path: Path
    steps: pd.DataFrame
    phases: pd.DataFrame
    kernels: pd.DataFrame
    collectives: pd.DataFrame
    notes: Sequence[str] = ()
    hides_communication: bool = False

    @cached_property
    def windows(self) -> Intervals:
        """The time that counts as each step's own: on a device `device_windows`, else the host's step."""
        on_host = self.steps[["start", "end"]].to_numpy(dtype=np.float64)
        return device_windows(self.kernels, on_host) if self.kind == "cuda" else on_host

    def issued_kernels(self) -> pd.DataFrame:
        """The `kernels` that the analysed steps issued."""
        return self.kernels[self.kernels["launch"].between(self.steps["start"].iloc[0], self.steps["end"].iloc[-1])]

    def intervals(self, lane: str) -> Intervals:
        chosen = self.kernels[self.kernels["lane"] == lane]
        return chosen[["start", "end"]].to_numpy(dtype=np.float64)

    def collectives_by_step(self) -> pd.DataFrame:
        """`collectives` in the order of issue, with a column step: the number of the step that issued each."""
        calls = self.collectives.sort_values("issued", kind="stable")
        return calls.assign(step=self.step_at(calls["issued"]))

    def step_at(self, moments: "pd.Series[float]") -> NDArray[np.int64]:
        """The number of the step in which the host was at each of `moments`, none of which is before the first."""
        place = np.searchsorted(self.steps["start"].to_numpy(), moments.to_numpy(), side="right") - 1
        return self.steps["number"].to_numpy()[place]


def build_timeline(trace: RankTrace, rank: int, include_last_step: bool) -> RankTimeline:
    """The timeline of one rank.

    Args:
        include_last_step: Analyse the last profiled step too. It is left out otherwise, since a GPU trace may have cut
            off its end. A trace of one step is analysed whole.

    Raises:
        UserError: no ProfilerStep, its clock is broken, or nothing ran in the analysed steps, or for no time.
    """
    # repair events
    path, info = trace.path, trace.info
    steps = profiler_steps(trace.events, path)
    notes = [*trace.notes]
    events = trace.events
    for repair in (lambda table: without_absurd(table, steps), with_launches, without_early):
        events, sentences = repair(events)
        notes += sentences
    # steps and kernels
    profiled = steps
    if not include_last_step and len(steps) > 1:
        steps = steps.iloc[:-1]
    world_size = info.get("world_size")
    world_size = world_size if type(world_size) is int and 0 < world_size <= MOST_RANKS else None
    on_device = events["cat"].isin(DEVICE_CATEGORIES)
    kind = "cuda" if on_device.any() else "cpu"
    operators = on_training_thread(events, steps).iloc[: 0 if kind == "cuda" else None]
    kernels = device_kernels(events[on_device]) if kind == "cuda" else lower_cpu_events(events, operators)
    begin, end = steps["start"].iloc[0], steps["end"].iloc[-1]
    issued = kernels["launch"].between(begin, end)
    # do they make sense?
    if (steps["end"] <= steps["start"]).any():
        raise UserError(f"{path}: a step in it lasts no time; its clock stood still")
    if not (issued & (kernels["end"] > kernels["start"])).any():
        raise UserError(f"{path}: nothing ran in steps {steps['number'].tolist()}; profile more steps")
    last = device_windows(kernels, steps[["start", "end"]].to_numpy(dtype=float))[-1, 1] if kind == "cuda" else end
    if unseen := int(((trace.unseen >= begin) & (trace.unseen <= end)).sum()):
        notes.append(f"kernels that were launched are not in the trace ({unseen}), so busy time lacks theirs")
    # collectives
    running = (kernels["start"] < last) & (kernels["end"] > begin)
    collectives, sentences = gloo_collectives(events, world_size or 0, only_group(info))
    notes += sentences
    if kind == "cuda":
        on_streams = device_collectives(events[on_device], events, info, world_size or 0)
        collectives = pd.concat([collectives, on_streams], ignore_index=True)
    collectives = collectives[collectives["issued"].between(begin, end)]
    hides = kind == "cuda" and not (kernels["lane"] == "communication").any()
    calls = int((events["name"].str.startswith(HOST_CALLS) & events["start"].between(begin, end)).sum())
    calls *= hides and world_size != 1  # a rank alone sends nothing
    if calls:
        notes.append(
            f"the host calls collectives ({calls}), but none of their kernels is in the trace: what was sent, and how "
            "much of its time was exposed, is unknown"
        )
    # phases
    is_phase = events["name"].isin(PHASES) | events["name"].str.startswith("pipeline ")
    phases = events[is_phase & (events["cat"] == "user_annotation")]
    return RankTimeline(
        rank=rank,
        world_size=world_size,
        kind=kind,
        path=path,
        steps=steps.reset_index(drop=True),
        phases=phases[["name", "start", "end"]].reset_index(drop=True),
        kernels=kernels[issued | running].reset_index(drop=True),
        collectives=collectives.reset_index(drop=True),
        notes=[*notes, *of_timeline(kernels[issued | running], profiled, operators)],
        hides_communication=hides and bool(calls or (collectives["group_size"] > 1).any()),
    )


def without_absurd(events: pd.DataFrame, steps: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """`events` without those that are longer than twice the time of all profiled steps, or as far away from them."""
    first, last = steps["start"].min(), steps["end"].max()
    far = 2 * (last - first) + 1e6
    is_near = events["start"].between(first - far, last + far)
    is_sensible = is_near & (events["end"] - events["start"] <= far)
    is_odd = (events["launch"] - first).abs() > far
    events = events.assign(launch=events["launch"].mask(is_odd), is_unlaunched=events["is_unlaunched"] | is_odd)
    note = f"events far from its steps, or much longer, are left out of all figures ({(~is_sensible).sum()})"
    return events[is_sensible], [note] if not is_sensible.all() else []


def device_kernels(device: pd.DataFrame) -> pd.DataFrame:
    """Columns lane, stream, name, start, end, launch of what ran on the device."""
    is_collective = device["name"].str.match(COLLECTIVE_KERNEL)
    is_copy = device["name"].str.match(r"^(Memcpy|Memset|dma)")
    lane = np.select([is_collective, is_copy], ["communication", "memory"], default="compute")
    return device.assign(lane=lane)[KERNEL_COLUMNS]


def on_training_thread(events: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """The operators that compute; the column thread of `steps` says which thread trains."""
    is_ours = (events["cat"] == "cpu_op") & (events["thread"] == steps["thread"].iloc[0])
    return events[is_ours & events["name"].str.match(COMPUTE_OPERATOR)]


def lower_cpu_events(events: pd.DataFrame, operators: pd.DataFrame) -> pd.DataFrame:
    """The same columns for a trace without a device: its events, and those of them that are `on_training_thread`."""
    compute = outermost(operators).assign(lane="compute", stream="compute")
    spans = events[events["name"].str.startswith(GLOO)]
    communication = spans.assign(lane="communication", stream="gloo " + spans["thread"].str.split().str[1])
    kernels = pd.concat([compute, communication], ignore_index=True)
    return kernels.assign(launch=kernels["start"])[KERNEL_COLUMNS]


def outermost(events: pd.DataFrame) -> pd.DataFrame:
    """The `events` of one thread (properly nested) that lie in no other event."""
    ordered = events.sort_values(["start", "end"], ascending=[True, False], kind="stable")
    ends = ordered["end"].to_numpy()
    furthest_before = np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    return ordered[ordered["start"].to_numpy() >= furthest_before]


def profiler_steps(events: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Columns number, start, end, thread of the profiled optimizer steps, on the thread that has most of them.

    Raises:
        UserError: there are none, or their times are impossible.
    """
    steps = events[(events["cat"] == "user_annotation") & events["name"].str.fullmatch(STEP_NAME)].copy()
    if steps.empty:
        raise UserError(f"{path}: no {STEP_PREFIX} in it; call profiler.step() after each optimizer step")
    steps["number"] = steps["name"].str.removeprefix(STEP_PREFIX).astype(int)
    steps = steps.sort_values("number", kind="stable")
    steps = steps[steps["thread"] == steps["thread"].value_counts(sort=False).idxmax()]
    ends, starts = steps["end"].to_numpy()[:-1], steps["start"].to_numpy()[1:]
    for index in np.flatnonzero(starts < ends - CLOCK_STEP_US):
        first, second = steps["number"].iloc[index], steps["number"].iloc[index + 1]
        raise UserError(f"{path}: step {second} begins before step {first} has ended; its clock went back")
    if (endless := steps[steps["end"] - steps["start"] > LONGEST_STEP_US]).size:
        raise UserError(f"{path}: step {endless['number'].iloc[0]} lasts longer than a day; its clock is broken")
    return steps[["number", "start", "end", "thread"]]


def device_windows(kernels: pd.DataFrame, bounds: Intervals) -> Intervals:
    """When a device worked on each step: from the end of the step before to the end of the step's last kernel.

    A kernel belongs to the step that launched it. The host runs ahead: it may be in the next step but one while the
    device works on this one. The windows follow each other without gaps, so each moment counts once. The first begins
    when the kernels of earlier steps are done, but not before the host's step. If a kernel was launched before the
    trace began, its launch is not in it; such kernels come before all others on their stream.

    Args:
        kernels: Columns stream, start, end, launch.
        bounds: The host's steps, in order.
    """
    is_issued = kernels["launch"].between(bounds[0, 0], bounds[-1, 1])
    place = np.searchsorted(bounds[:, 0], kernels.loc[is_issued, "launch"].to_numpy(float), side="right") - 1
    ends = np.full(len(bounds), -np.inf)
    np.maximum.at(ends, place, kernels.loc[is_issued, "end"].to_numpy(float))
    first = kernels["stream"].map(kernels[is_issued].groupby("stream")["start"].min())
    earlier = (kernels["launch"] < bounds[0, 0]) | (kernels["launch"].isna() & (kernels["start"] < first))
    begin = max(bounds[0, 0], kernels.loc[earlier, "end"].max()) if earlier.any() else bounds[0, 0]
    edges = np.maximum.accumulate([begin, *ends])
    return np.column_stack([edges[:-1], edges[1:]])
