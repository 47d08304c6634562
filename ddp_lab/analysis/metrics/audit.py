"""Expected against measured: what a run should do by its own formulas, and what its traces and record show.

A strategy that sends too much, too little or nothing still trains and still has a step time. The audit finds it.

- Traffic: the collectives in the analysed steps of every rank are compared with the strategy's `expected_traffic`. On a
  mesh each dimension is compared by itself, unless a trace does not name process groups. A strategy may have a lower
  bound in place of a formula. Then every step of every rank must equal the first step of the first rank (of the same
  rank, if layers are cut: parts differ), and must send at least as many bytes as the bound. If the payload of a call
  depends on a rank's samples, only the number of calls is compared.
  Only full steps are compared; each row says how many. The last step of an epoch may have fewer samples, so fewer
  micro-batches, and in some strategies every micro-batch communicates.
- Memory at rest is compared with the formula of the strategy.
- Steps and samples are compared with the configuration.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from ddp_lab.analysis.columns import COLUMNS, COMPONENTS, SHARDABLE
from ddp_lab.analysis.mesh import Mesh, in_order, mesh_of
from ddp_lab.analysis.metrics.dimensions import dimensions
from ddp_lab.analysis.traces.collectives import sent_bytes
from ddp_lab.analysis.traces.timeline import RankTimeline
from ddp_lab.collectives.kinds import LABELS, label

MEMORY_TOLERANCE, MEMORY_TOLERANCE_BYTES = 0.005, 65536
"""The larger of the two is allowed for padding to the world size and Adam's step counters, which no formula has."""
CHECK = ["subject", "rank", "unit", "expected", "measured", "tolerance", "steps"]
Check = tuple[str, int | None, str, float, float, float, int | None]
"""A row of `audit.csv`, as `columns.toml` explains it. Measured is NaN if the trace does not say."""
AT_LEAST = "sent in all at least"
KEY = ["dimension", "kind", "made_of"]


def audit(timelines: list[RankTimeline], record: dict[str, Any] | None) -> pd.DataFrame:
    """All checks of a window, a row each. Without a run record nothing is expected, so there are no rows."""
    checks = [*_run_checks(record), *_traffic_checks(timelines, record), *_memory_checks(record)] if record else []
    table = pd.DataFrame(checks, columns=CHECK).astype({"rank": "Int64", "steps": "Int64"})
    table["difference"] = table["measured"] - table["expected"]
    is_right = table["difference"].abs() <= table["tolerance"]
    is_right |= (table["subject"] == AT_LEAST) & (table["difference"] > 0)
    passes = np.where(is_right, "pass", "fail")
    table["result"] = np.where(table["measured"].isna(), "unknown", passes)
    return table[list(COLUMNS["audit"])]


def _run_checks(record: dict[str, Any]) -> Iterator[Check]:
    """Optimizer steps and samples of the run, against its configuration."""
    config, epoch_samples = record["config"], record["train_samples"]
    batch = config["global_batch_size"]
    steps_per_epoch = -(-epoch_samples // batch)
    steps = min(config["epochs"] * steps_per_epoch, config["max_steps"] or np.inf)
    whole_epochs, steps_left = divmod(steps, steps_per_epoch)
    samples = whole_epochs * epoch_samples + steps_left * batch
    yield "optimizer steps", None, "steps", steps, len(record["train_loss"]), 0, None
    yield "samples trained on", None, "samples", samples, sum(record["step_samples"]), 0, None
    if record["eval"]:
        yield "samples evaluated", None, "samples", record["eval_samples"], record["eval"]["samples"], 0, None


def _traffic_checks(timelines: list[RankTimeline], record: dict[str, Any]) -> Iterator[Check]:
    """Calls and payload of each kind of collective, in each full step of each rank; unknown without a full step.

    A single rank on a device has no checks, nor has a group of one rank: NCCL only copies, so no call is in a trace.
    """
    mesh = mesh_of(record)
    cuts_layers = not {"tp", "pp"}.isdisjoint(mesh or ())
    if any((timeline.collectives["group"] == "").any() for timeline in timelines):
        mesh = None
    first: pd.DataFrame | None = None
    for timeline in timelines:
        rank, on_device = timeline.rank, timeline.kind == "cuda"
        traffic = [part for part in record["expected_traffic"] if part.get("rank") in (None, rank)]
        is_unknown = bool(record["expected_traffic"]) and not traffic  # of this stage: the run ended too early
        is_unknown |= timeline.hides_communication and timeline.collectives.empty
        if is_unknown or (record["world_size"] == 1 and on_device):
            continue
        # expected and measured calls
        expected = expected_calls(traffic, mesh is not None, on_device)
        steps, measured = full_steps(timeline, record), calls_by_step(timeline, mesh)
        # without a formula, the first step of the first rank
        if is_bound := any(part.get("at_least") for part in traffic):
            if first is None or cuts_layers:
                first = measured.loc[measured["step"].isin(steps[:1]), ["calls", "bytes"]]
            expected = first.assign(varies=expected["varies"].reindex(first.index, fill_value=False))
        # each kind of collective
        keys = {*expected.index, *measured.index}
        order, place = in_order(mesh or {}, [dimension for dimension, *_ in keys]), [*LABELS]
        for key in sorted(keys, key=lambda of: (order.index(of[0]), place.index(of[1]), of[2])):
            calls, payload, varies = expected.loc[key] if key in expected.index else (0, 0, False)
            by_step = measured[measured.index == key].set_index("step").reindex(steps, fill_value=0)
            subject = f"{key[0] or 'other groups'} {label(*key[1:])}" if mesh else label(*key[1:])
            count = furthest(by_step["calls"], calls)
            yield f"{subject}: calls", rank, "calls/step", calls, count, 0, len(steps)
            if not varies:
                size = furthest(by_step["bytes"], payload)
                yield f"{subject}: payload", rank, "bytes/step", payload, size, 0, len(steps)
        # bytes sent in all
        if not expected["varies"].any() and all(part.get("wire_bytes") is not None for part in traffic):
            sent = measured.groupby("step")["sent"].agg(lambda sizes: sizes.sum(skipna=False))
            expects = sum(part["wire_bytes"] for part in traffic)
            sizes = sent.reindex(steps, fill_value=0)
            if is_bound:
                yield AT_LEAST, rank, "bytes/step", expects, sizes.min(skipna=False), 0.5, len(steps)
            else:
                yield "sent in all", rank, "bytes/step", expects, furthest(sizes, expects), 0.5, len(steps)


def expected_calls(traffic: list[dict[str, Any]], on_mesh: bool, on_device: bool) -> pd.DataFrame:
    """Columns calls, payload and varies of a full step by `KEY`; the dimension is empty unless `on_mesh`.

    Args:
        on_device: Leave out groups of one rank, in which NCCL copies at most.
    """
    rows = [
        (
            part.get("dimension", "") if on_mesh else "",
            part["kind"] if part["kind"] in LABELS else "other",
            part.get("made_of", ""),
            *(part["count"], part["payload_bytes"], part.get("varies", False)),
        )
        for part in traffic
        if not (on_mesh and on_device and part.get("group_size") == 1)
    ]
    table = pd.DataFrame(rows, columns=[*KEY, "calls", "payload", "varies"])
    return table.groupby(KEY).agg({"calls": "sum", "payload": "sum", "varies": "any"}).astype(object)


def full_steps(timeline: RankTimeline, record: dict[str, Any]) -> list[int]:
    """The analysed steps that trained on a whole global batch.

    `ProfilerStep#n` is optimizer step n, counted from 0, since the profiler starts before the first step.
    """
    samples = dict(enumerate(record["step_samples"]))
    global_batch = record["config"]["global_batch_size"]
    return [number for number in timeline.steps["number"] if samples.get(number) == global_batch]


def calls_by_step(timeline: RankTimeline, mesh: Mesh | None = None) -> pd.DataFrame:
    """What one rank issued in each analysed step: columns step, calls, bytes and sent (NaN if a size is unknown), by
    `KEY`. The dimension is empty without a mesh."""
    calls = timeline.collectives_by_step()
    kinds = calls["kind"].where(calls["kind"].isin(LABELS), "other")
    named = calls.assign(kind=kinds, dimension=dimensions(calls["group"], mesh), sent=sent_bytes(calls), calls=1)
    table = named.groupby(["step", *KEY])[["calls", "bytes", "sent"]].agg(pd.Series.sum, skipna=False)
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
            expected, measured = row[f"expected_{component}_bytes"], row[f"{component}_bytes"]
            tolerance = max(MEMORY_TOLERANCE * expected, MEMORY_TOLERANCE_BYTES)
            yield f"{COMPONENTS[component]} at rest", row["rank"], "bytes", expected, measured, tolerance, None
