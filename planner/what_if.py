"""From a recorded run, what another setting would give: its own compute and its own collectives, another simulation.

- Compute: in each phase of the profiled steps (forward, backward, gradient_sync, optimizer), all time in which the rank
  did not merely wait for a collective. A roofline says how that is shared out among operators; one factor a phase makes
  the simulated phase as long. Time between phases, and in phases in which a simulation has no operator, is added as it
  is. What compute and communication took from each other in the recorded steps stays in it. On a GPU, where the host's
  phases say little of when kernels ran, one factor serves all.
- Collectives: the time that each kept the links, fitted by payload (`training/link_model.py`). Of several in flight at
  once each counts for its share; of all ranks that were read the shortest counts, since the others waited for the last.
- Another number of ranks: hops and bytes of the algorithms (`planner/volumes.py`). Another rate: transfers in
  proportion, from the rate that the link lab had shaped the link to, or else from what all-reduces reached; latencies
  stay.

How far off that is on the setting that was measured is said beside every answer.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from analysis.choices import last_window
from analysis.compare import latest_record
from analysis.errors import TraceError
from analysis.intervals import Intervals, clip, length, minus, union
from analysis.summary import read_rank, read_record
from analysis.timeline import RankTimeline
from planner import hardware
from planner.cluster import Cluster, Link
from planner.collective_fits import FittedCosts
from planner.contracts import CollectiveCost, CollectiveCosts, Contention, OperatorCall, OperatorCosts, Simulated
from planner.costs import roofline
from planner.runs import first_micro_batches, setting
from planner.simulate import simulate
from planner.volumes import KINDS, volume
from training.config import RunConfig
from training.errors import UserError
from training.link_model import LinkModel, Piece
from training.rates import Rate

MOST_RANKS_READ = 8
"""Traces of a run that are read: more say little more of how long a collective takes."""
US = 1e-6


@dataclass(frozen=True)
class Recorded:
    """A run, and what its traces say.

    Attributes:
        step_s: Median of the steps that the profiler did not bend.
        busy_s: Seconds of a profiled step in which the rank did not only wait, by phase; `` for the rest of a step.
        collectives: Seconds by payload bytes, for each kind.
    """

    record: Mapping[str, Any]
    config: RunConfig
    kind: str
    step_s: float
    busy_s: Mapping[str, float]
    collectives: Mapping[str, LinkModel]

    @property
    def world_size(self) -> int:
        return int(self.record["world_size"])


@dataclass(frozen=True)
class Asked:
    """What should differ; None: nothing.

    Attributes:
        rate: Of every link.
        bucket_cap_mb: As `--bucket-cap-mb` of the runner.
    """

    ranks: int | None = None
    rate: Rate | None = None
    bucket_cap_mb: float | str | None = None
    choice: str | None = None


# Reading a run --------------------------------------------------------------------------------------------------------


def read_run(path: Path) -> Recorded:
    """A run by its record (`profile/<choice>/<run_id>.run.json`), or the latest of a folder `profile/<choice>`.

    Raises:
        UserError: there is none, it ended early, or it has no traces that can be used.
    """
    try:
        record = latest_record(path) if path.is_dir() else read_record(path)
        if record is None:
            raise UserError(f"{path}: no run record (*.run.json) in this folder; give profile/<choice> of a run")
        folder = path if path.is_dir() else path.parent
        window = last_window(folder, record["run_id"])
        found = [read_rank(file, rank, False) for rank, file in list(window.files.items())[:MOST_RANKS_READ]]
    except TraceError as error:
        raise UserError(str(error)) from None
    timelines = [each for each in found if isinstance(each, RankTimeline)]
    if not timelines:
        raise UserError(str(found[0]))
    step_s = record.get("step_time_median_s")
    if not step_s:
        raise UserError(f"{path}: the record has no step that was timed without the profiler; train more steps")
    models = fits(timelines)
    if not models:
        raise UserError(f"{path}: no collective with a known size is in the traces; train with two ranks or more")
    return Recorded(record, config_of(path, record), timelines[0].kind, step_s, busy_seconds(timelines), models)


def config_of(path: Path, record: Mapping[str, Any]) -> RunConfig:
    """The run's settings, of those that this version knows."""
    known = RunConfig.__dataclass_fields__
    try:
        config = RunConfig(**{name: value for name, value in record["config"].items() if name in known})
    except (TypeError, AttributeError):
        raise UserError(f"{path}: its settings cannot be read; train again") from None
    return replace(config, choice=record["choice"])


def busy_seconds(timelines: Sequence[RankTimeline]) -> dict[str, float]:
    """As in `Recorded.busy_s`, mean over steps and ranks."""
    totals: dict[str, float] = defaultdict(float)
    count = sum(len(timeline.steps) for timeline in timelines)
    for timeline in timelines:
        sent = union(timeline.collectives[["start", "end"]].to_numpy(dtype=np.float64))
        waiting = minus(sent, union(timeline.intervals("compute")))
        steps = timeline.steps[["start", "end"]].to_numpy(dtype=np.float64)
        rest = length(steps) - inside(waiting, steps)
        if timeline.kind == "cpu":
            for name, spans in timeline.phases.groupby("name"):
                phase = overlap(union(spans[["start", "end"]].to_numpy(dtype=np.float64)), steps)
                busy = length(phase) - inside(waiting, phase)
                totals[str(name)] += busy * US / count
                rest -= busy
        totals[""] += rest * US / count
    return dict(totals)


def overlap(first: Intervals, second: Intervals) -> Intervals:
    parts = [clip(first, start, end) for start, end in second]
    return union(np.concatenate(parts)) if parts else np.empty((0, 2))


def inside(intervals: Intervals, places: Intervals) -> float:
    return length(overlap(intervals, places))


def fits(timelines: Sequence[RankTimeline]) -> dict[str, LinkModel]:
    """Seconds by payload of each kind of collective that moved something, in proportion where all had one size."""
    shortest: dict[tuple[str, int, float], float] = {}
    for timeline in timelines:
        of_tensors = timeline.collectives["kind"].isin(KINDS) & (timeline.collectives["bytes"] > 0)
        calls = timeline.collectives[of_tensors].sort_values("issued", kind="stable")
        seconds = shared_out(calls[["start", "end"]].to_numpy(dtype=np.float64)) * US
        numbers: dict[tuple[str, float], int] = defaultdict(int)
        for kind, size, each in zip(calls["kind"], calls["bytes"], seconds, strict=True):
            number = numbers[kind, size]
            numbers[kind, size] += 1
            key = (kind, number, size)
            shortest[key] = min(each, shortest.get(key, float("inf")))
    by_kind: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (kind, _, size), each in shortest.items():
        if each > 0:
            by_kind[kind].append((size, each))
    models = {}
    for kind, points in by_kind.items():
        sizes, times = zip(*points, strict=True)
        if min(sizes) == max(sizes):  # which part is latency, one size does not say
            models[kind] = LinkModel((Piece(0.0, 0.0, median(times) / sizes[0]),))
        else:
            models[kind] = LinkModel.fit(sizes, times, most_pieces=1)
    return models


def shared_out(intervals: Intervals) -> np.ndarray:
    """Each interval's length, where each moment is shared out equally among all intervals that cover it."""
    edges = np.unique(intervals)
    begins, ends = edges[:-1], edges[1:]
    covers = (intervals[:, :1] <= begins) & (intervals[:, 1:] >= ends)
    return (covers * ((ends - begins) / np.maximum(covers.sum(axis=0), 1))).sum(axis=1)


# Costs ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factored:
    """Operators of a roofline, each multiplied by the factor of the phases in which it was simulated.

    Attributes:
        factors: By name and shapes.
        mean: For operators that were not simulated, such as another strategy's.
    """

    costs: OperatorCosts
    factors: Mapping[tuple[str, Any], float]
    mean: float

    def seconds(self, call: OperatorCall) -> float | None:
        known = self.costs.seconds(call)
        return None if known is None else known * self.factors.get((call.name, call.shapes), self.mean)


def factored(plain: OperatorCosts, simulated: Simulated, busy_s: Mapping[str, float]) -> tuple[Factored, float]:
    """Costs with which each phase computes as long as it was recorded, and the seconds of a step that no phase's
    operators can stand for.

    Args:
        simulated: A step of the recorded setting, with the costs `plain`.
    """
    phases = [span for span in simulated.spans if span.lane == "phase"]
    parts: dict[str, dict[tuple[str, Any], float]] = defaultdict(lambda: defaultdict(float))
    for span in simulated.spans:
        if span.lane == "compute":
            name = next((p.name for p in phases if p.start_s <= span.start_s < p.end_s), "")
            place = name if name in busy_s and name else ""
            parts[place][span.name, span.details["shapes"]] += span.end_s - span.start_s
    by_phase = {name: sum(operators.values()) for name, operators in parts.items()}
    whole = not any(busy_s[name] for name in busy_s if name)  # a GPU's: one factor for all
    recorded = {"": busy_s[""]} if whole else {name: seconds for name, seconds in busy_s.items() if name}
    factor = {name: recorded[name] / simulated_s for name, simulated_s in by_phase.items() if name in recorded}
    rest = sum(busy_s.values()) - sum(recorded[name] for name in factor)
    times: dict[tuple[str, Any], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, operators in parts.items():
        for key, seconds in operators.items():
            times[key][0] += seconds * factor.get(name, 0.0)
            times[key][1] += seconds
    scaled = {key: new / old for key, (new, old) in times.items() if old}
    total = sum(by_phase.values())
    mean = sum(factor.get(name, 0.0) * seconds for name, seconds in by_phase.items()) / total if total else 1.0
    return Factored(plain, scaled, mean), max(rest, 0.0)


@dataclass(frozen=True)
class Faster:
    """Transfers `factor` times as fast."""

    costs: CollectiveCosts
    factor: float

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        known = self.costs.cost(kind, payload_bytes, ranks)
        return replace(known, transfer_s=known.transfer_s / self.factor)


def recorded_rate(run: Recorded) -> float:
    """Bytes a second of the recorded link: as the link lab shaped it, or what all-reduces (else another kind) reached.

    Raises:
        UserError: the collectives do not show it.
    """
    bits = run.record.get("link_bits_per_s")
    if bits:
        return float(bits) / 8
    kind = "all_reduce" if "all_reduce" in run.collectives else next(iter(run.collectives))
    per_byte = run.collectives[kind].pieces[-1].seconds_per_byte
    if not per_byte:
        raise UserError("the recorded collectives are too small to show the link's rate; --rate needs larger ones")
    return volume(kind, str(run.record["backend"]), run.world_size).busiest / per_byte


# Answering ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A step of one setting. `step_s` holds what a simulation has no operator for, too."""

    config: RunConfig
    world_size: int
    simulated: Simulated
    step_s: float


class WhatIf:
    """Answers for one run.

    Raises:
        UserError: the run's device, model or choice cannot be simulated.
    """

    def __init__(self, run: Recorded) -> None:
        self.run = run
        name = "cpu" if run.kind == "cpu" else str(run.record.get("device_name", ""))
        self._device = hardware.device(name)
        self._plain = roofline(self._device)
        self._batches = first_micro_batches(run.config, run.world_size)
        self._operators: OperatorCosts = self._plain
        self._rest_s = 0.0
        first = self.answer(Asked())
        self._operators, self._rest_s = factored(self._plain, first.simulated, run.busy_s)

    def answer(self, asked: Asked) -> Answer:
        """A step of the run with what is asked for; each rank keeps its own batch, so the global one grows with ranks.

        Raises:
            UserError: that makes no sense, or cannot be simulated.
        """
        run, ranks = self.run, asked.ranks or self.run.world_size
        changes: dict[str, Any] = {"global_batch_size": run.config.global_batch_size * ranks // run.world_size}
        if asked.bucket_cap_mb is not None:
            changes["bucket_cap_mb"] = asked.bucket_cap_mb
        if asked.choice is not None:
            changes["choice"] = asked.choice
        config = replace(run.config, **changes)
        backend = str(run.record["backend"])
        cluster = Cluster(self._device, 1, ranks, Link("as recorded", 0.0, 1.0), backend=backend)
        collectives: CollectiveCosts = FittedCosts(run.collectives, backend, run.world_size, "as recorded")
        if asked.rate is not None and asked.rate.bits_per_s:
            collectives = Faster(collectives, asked.rate.bits_per_s / 8 / recorded_rate(run))
        found = simulate(
            setting(config, ranks, self._batches), cluster, self._operators, collectives, Contention(), rank=0
        )
        return Answer(config, ranks, found, found.step_time_s + self._rest_s)
