"""One optimizer step of one rank, from its trace and its run record: memory and collectives on the same clock."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ddp_lab.analysis.mesh import in_order, mesh_of
from ddp_lab.analysis.metrics.dimensions import dimensions
from ddp_lab.analysis.metrics.memory import memory_timeline
from ddp_lab.analysis.report.figures.lanes import bounds
from ddp_lab.analysis.traces.reading import RankTrace
from ddp_lab.analysis.traces.timeline import PHASES, RankTimeline

GLOO_NAMES = {("scatter", "gradients"): "reduce-scatter", ("broadcast", "parameters"): "all-gather"}
"""Kind and purpose of the calls, one from each rank, that stand for one collective over Gloo
(`ddp_lab/strategy/communication/collectives.py`), and the name of that collective."""
PURPOSES = ("gradients", "parameters", "bookkeeping")
MARKS = {"forward": ("layers.", "aten::linear"), "backward": ("gradient of ", "torch::autograd::AccumulateGrad")}
"""By phase: how samples of memory begin that are taken after each layer or gradient, and the operator that makes it."""


@dataclass(frozen=True)
class TracedStep:
    """A step of one rank of a run over Gloo.

    Attributes:
        number: Of the step in `timeline`.
        trace: The file behind `timeline`.
        record: Of the run.
    """

    number: int
    timeline: RankTimeline
    trace: RankTrace
    record: dict[str, Any]

    @classmethod
    def shortest(cls, timeline: RankTimeline, trace: RankTrace, record: dict[str, Any]) -> "TracedStep":
        """The step with which the machine interfered least. Not the first one, before which nothing is seen."""
        steps = timeline.steps.iloc[1:]
        shortest = int((steps["end"] - steps["start"]).to_numpy().argmin())
        return cls(int(steps["number"].iloc[shortest]), timeline, trace, record)

    @property
    def ms(self) -> float:
        """How long it took."""
        start, end = bounds(self.timeline, self.number)
        return (end - start) / 1000

    @property
    def held(self) -> dict[str, Any]:
        """The run record's row on this rank's memory."""
        return next(row for row in self.record["memory"] if row["rank"] == self.timeline.rank)

    def phases(self) -> pd.DataFrame:
        """Columns name, start, end (ms since the step began)."""
        begin, stop = bounds(self.timeline, self.number)
        phases = self.timeline.phases
        inside = phases["name"].isin(PHASES) & phases["start"].between(begin, stop)
        found = phases[inside].sort_values("start")
        return found.assign(start=(found["start"] - begin) / 1000, end=(found["end"] - begin) / 1000)

    def memory(self) -> pd.DataFrame:
        """Samples of this rank's memory (`memory_timeline`), with a column at: ms since the traced step began.

        Memory is sampled in one more step after training, not in the traced one. Both do the same in the same order.
        So phases, layers in forward and gradients in backward are matched one by one, and each sample in between lies
        in proportion.

        Raises:
            ValueError: The record has no timeline of memory, or one of other phases.
        """
        found = memory_timeline(self.record, self.timeline.rank)
        traced = self.phases()
        if found is None or found[1]["name"].tolist() != traced["name"].tolist():
            raise ValueError(f"{self.record['choice']}: the run record has no memory of the step that was traced")
        samples, phases = found
        pairs = [(0.0, 0.0)]
        for recorded, seen in zip(phases.to_dict("records"), traced.to_dict("records"), strict=True):
            first, last = recorded["start_ms"], recorded["end_ms"]
            matched = self._matched(samples[samples["ms"].between(first, last)], seen)
            pairs += [(first, seen["start"]), *matched, (last, seen["end"])]
        pairs.append((float(samples["ms"].iloc[-1]), self.ms))
        recorded_ms, traced_ms = np.maximum.accumulate(np.array(pairs, dtype=float)).T
        return samples.assign(at=np.interp(samples["ms"], recorded_ms, traced_ms))

    def _matched(self, samples: pd.DataFrame, phase: Mapping[Any, Any]) -> list[tuple[float, float]]:
        """When each layer or gradient of a phase was done: in the recorded step, and in the traced one."""
        if phase["name"] not in MARKS:
            return []
        beginning, operator = MARKS[phase["name"]]
        recorded = samples.loc[samples["where"].str.startswith(beginning), "ms"].tolist()
        events = self.trace.events
        done = (events.loc[events["name"] == operator, "end"] - bounds(self.timeline, self.number)[0]) / 1000
        traced = done[done.between(phase["start"], phase["end"])].sort_values().tolist()
        return list(zip(recorded, traced, strict=True)) if len(recorded) == len(traced) else []

    def collectives(self) -> pd.DataFrame:
        """What is under way in the step, a row a collective: lane (its purpose; on a mesh, its dimension), name, bytes,
        is_of_step (whether it was issued in this step, not the one before), and issued, start, end (ms since the step
        began, cut to the step)."""
        begin, stop = bounds(self.timeline, self.number)
        calls = self.timeline.collectives.sort_values("issued", kind="stable")
        found = self._by_purpose(calls) if mesh_of(self.record) is None else self._by_dimension(calls)
        found = found[(found["end"] > begin) & (found["issued"] < stop)].reset_index(drop=True)
        found["is_of_step"] = found["issued"] >= begin
        moments = ["issued", "start", "end"]
        found[moments] = (found[moments].clip(begin, stop) - begin) / 1000
        return found

    def lanes(self) -> list[str]:
        """Those of `collectives`, in order."""
        mesh = mesh_of(self.record)
        return list(PURPOSES) if mesh is None else [f"along {name}" for name in in_order(mesh, list(mesh))]

    def _by_purpose(self, calls: pd.DataFrame) -> pd.DataFrame:
        keys = list(zip(calls["kind"], calls["kind"].map(self.purposes()), strict=True))
        ranks = self.record["world_size"]
        calls = calls.assign(
            lane=[purpose for _, purpose in keys],
            name=[GLOO_NAMES.get(key, key[0].replace("_", "-")) for key in keys],
            collective=calls.groupby("kind").cumcount() // [ranks if key in GLOO_NAMES else 1 for key in keys],
            bytes=calls["bytes"] / [ranks if kind == "scatter" else 1 for kind, _ in keys],
        )
        parts = {"bytes": "sum", "issued": "min", "start": "min", "end": "max"}
        return calls.groupby(["kind", "collective", "lane", "name"], sort=False).agg(parts).reset_index()

    def _by_dimension(self, calls: pd.DataFrame) -> pd.DataFrame:
        """Each call by itself: several purposes share kinds of calls, and groups."""
        lanes = "along " + dimensions(calls["group"], mesh_of(self.record))
        return calls.assign(lane=lanes, name="call")

    def purposes(self) -> dict[str, str]:
        """What each kind of call is for; over Gloo no kind is for two things, where a model has no buffers."""
        return {part["kind"]: part["purpose"] for part in self.record["expected_traffic"]}
