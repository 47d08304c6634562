"""Expected against measured: what a run should do by its own formulas, and what its traces and record show.

A strategy that sends too much, too little or nothing still trains and still has a step time. The audit finds it.

- Traffic: the collectives in the analysed steps of every rank are compared with the strategy's `expected_traffic`. On a
  mesh those of each dimension are compared by themselves, unless a trace does not say in which groups they ran. The
  traffic is that of a full step. Of calls whose payload depends on a rank's samples, only the number is compared. The
  last step of an epoch may have fewer samples, so fewer micro-batches, and in some strategies every micro-batch
  communicates. Such steps are left out; each row says how many steps were compared.
- Memory at rest is compared with the formula of the strategy.
- Steps and samples are compared with the configuration.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddp_lab.analysis.columns import AUDIT_COLUMNS, COMPONENTS, SHARDABLE
from ddp_lab.analysis.mesh import Mesh, in_order, mesh_of
from ddp_lab.analysis.metrics.dimensions import dimensions
from ddp_lab.analysis.traces.collectives import sent_bytes
from ddp_lab.analysis.traces.timeline import RankTimeline
from ddp_lab.collectives.kinds import LABELS, label

MEMORY_TOLERANCE, MEMORY_TOLERANCE_BYTES = 0.005, 65536
"""The formula leaves out padding to the world size and Adam's step counters. They are below the larger of these two."""


class Check(NamedTuple):
    """A row of `audit.csv`.

    Attributes:
        subject: What is checked.
        rank: On which rank; None for a figure of the whole run.
        unit: Of the figures.
        expected: By the formula or the configuration.
        measured: Of several steps, the value furthest from the expected one. NaN if the trace does not say.
        tolerance: The largest difference that passes.
        steps: How many analysed steps were compared; None if the figure is not counted by step.
    """

    subject: str
    rank: int | None
    unit: str
    expected: float
    measured: float
    tolerance: float = 0.0
    steps: int | None = None

    @property
    def difference(self) -> float:
        return self.measured - self.expected

    @property
    def result(self) -> str:
        """`pass`, `fail`, or `unknown` if the trace does not say."""
        if np.isnan(self.measured):
            return "unknown"
        return "pass" if abs(self.difference) <= self.tolerance else "fail"


def audit(timelines: list[RankTimeline], record: dict[str, Any] | None) -> pd.DataFrame:
    """All checks of a window, a row each. Without a run record nothing is expected, so there are no rows."""
    checks = [*_run_checks(record), *_traffic_checks(timelines, record), *_memory_checks(record)] if record else []
    rows = [{**check._asdict(), "difference": check.difference, "result": check.result} for check in checks]
    return pd.DataFrame(rows, columns=list(AUDIT_COLUMNS)).astype({"rank": "Int64", "steps": "Int64"})


def _run_checks(record: dict[str, Any]) -> Iterator[Check]:
    """Optimizer steps and samples of the run, against its configuration."""
    config, data = record["config"], record["train_samples"]
    size = config["global_batch_size"]
    in_epoch = -(-data // size)
    steps = min(config["epochs"] * in_epoch, config["max_steps"] or np.inf)
    whole_epochs, left = divmod(steps, in_epoch)
    yield Check("optimizer steps", None, "steps", steps, len(record["train_loss"]))
    seen = sum(record["step_samples"])
    yield Check("samples trained on", None, "samples", whole_epochs * data + left * size, seen)
    if record["eval"]:
        yield Check("samples evaluated", None, "samples", record["eval_samples"], record["eval"]["samples"])


def _traffic_checks(timelines: list[RankTimeline], record: dict[str, Any]) -> Iterator[Check]:
    """Calls and payload of each kind of collective, in each full step of each rank; unknown without a full step.

    None for one rank on a device: NCCL then copies at most, so no collective is in the trace.
    """
    mesh = mesh_of(record)
    if any((timeline.collectives["group"] == "").any() for timeline in timelines):
        mesh = None
    for timeline in timelines:
        traffic = [part for part in record["expected_traffic"] if part.get("rank") in (None, timeline.rank)]
        is_unknown = bool(record["expected_traffic"]) and not traffic  # of this stage: the run ended early
        is_unknown |= timeline.hides_communication and timeline.collectives.empty
        if is_unknown or (record["world_size"] == 1 and timeline.kind == "cuda"):
            continue
        steps = full_steps(timeline, record)
        measured = calls_by_step(timeline, mesh)
        expected = expected_calls(traffic, mesh is not None, timeline.kind == "cuda")
        varying = expected_calls([p for p in traffic if p.get("varies")], mesh is not None, timeline.kind == "cuda")
        kinds = {*expected, *measured.index}
        order, place = in_order(mesh or {}, [name for name, _, _ in kinds]), [*LABELS]
        for key in sorted(kinds, key=lambda of: (order.index(of[0]), place.index(of[1]), of[2])):
            mine = measured.loc[[key]] if key in measured.index else measured.iloc[:0]
            by_step = mine.set_index("step")[["calls", "bytes"]].reindex(steps, fill_value=0)
            subject = f"{key[0] or 'other groups'} {label(*key[1:])}" if mesh else label(*key[1:])
            for column, figure, expects in zip(by_step, ("calls", "payload"), expected[key], strict=True):
                if figure == "payload" and key in varying:
                    continue
                found = furthest(by_step[column], expects)
                yield Check(f"{subject}: {figure}", timeline.rank, f"{column}/step", expects, found, steps=len(steps))
        if not varying and all(part.get("wire_bytes") is not None for part in traffic):
            sent = measured.groupby("step")["sent"].agg(lambda sizes: sizes.sum(skipna=False))
            expects = sum(part["wire_bytes"] for part in traffic)
            found = furthest(sent.reindex(steps, fill_value=0), expects)
            yield Check("sent in all", timeline.rank, "bytes/step", expects, found, 0.5, steps=len(steps))


def expected_calls(
    traffic: list[dict[str, Any]], on_mesh: bool, on_device: bool
) -> dict[tuple[str, str, str], list[int]]:
    """Calls and payload of a full step by dimension (empty unless `on_mesh`), kind and what it is made of; 0 where none
    are expected.

    Args:
        on_device: Leave out groups of one rank, in which NCCL copies at most.
    """
    expected: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for part in traffic:
        if not (on_mesh and on_device and part.get("group_size") == 1):
            dimension = part.get("dimension", "") if on_mesh else ""
            kind = part["kind"] if part["kind"] in LABELS else "other"
            figures = expected[dimension, kind, part.get("made_of", "")]
            figures[0] += part["count"]
            figures[1] += part["payload_bytes"]
    return expected


def full_steps(timeline: RankTimeline, record: dict[str, Any]) -> list[int]:
    """The analysed steps that trained on a whole global batch.

    `ProfilerStep#n` is optimizer step n, counted from 0, since the profiler starts before the first step.
    """
    samples = dict(enumerate(record["step_samples"]))
    whole = record["config"]["global_batch_size"]
    return [number for number in timeline.steps["number"] if samples.get(number) == whole]


def calls_by_step(timeline: RankTimeline, mesh: Mesh | None = None) -> pd.DataFrame:
    """What one rank issued in each analysed step: columns step, calls, bytes and sent (NaN if a size is unknown), by
    dimension (empty without a mesh), kind and what it is made of."""
    calls = timeline.collectives_by_step()
    kinds = calls["kind"].where(calls["kind"].isin(LABELS), "other")
    named = calls.assign(kind=kinds, dimension=dimensions(calls["group"], mesh), sent=sent_bytes(calls), calls=1)
    groups = named.groupby(["step", "dimension", "kind", "made_of"])[["calls", "bytes", "sent"]]
    table = groups.agg(pd.Series.sum, skipna=False)
    return table.reset_index("step")


def furthest(values: pd.Series, expected: float) -> float:
    """The value furthest from `expected`; NaN if a value is unknown or there is none."""
    if values.empty or values.isna().any():
        return float("nan")
    return float(values.iloc[int(np.argmax(np.abs(values.to_numpy(dtype=float) - expected)))])


def _memory_checks(record: dict[str, Any]) -> Iterator[Check]:
    """What each rank holds at rest, by component."""
    for row in record["memory"]:
        for component in SHARDABLE:
            expected = row[f"expected_{component}_bytes"]
            tolerance = max(MEMORY_TOLERANCE * expected, MEMORY_TOLERANCE_BYTES)
            label = f"{COMPONENTS[component]} at rest"
            yield Check(label, row["rank"], "bytes", expected, row[f"{component}_bytes"], tolerance)
