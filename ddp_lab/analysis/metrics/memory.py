"""Memory, from run records: figures by rank, the timeline of the recorded step, and what memory went to at its peak."""

import re
from typing import Any

import pandas as pd

from ddp_lab.analysis.columns import COLUMNS, COMPONENTS, SHARDABLE

COMMUNICATION, OTHER, CACHED, OUTSIDE = "communication", "activations and temporaries", "cached", "outside"
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
AMOUNT = r"([\d.]+) ?(bytes|[KMGT]iB)"
OUT_OF_MEMORY = {
    "request": rf"[Tt]ried to allocate {AMOUNT}",
    "tensors": rf"{AMOUNT} is allocated by PyTorch",
    CACHED: rf"{AMOUNT} is reserved by PyTorch but unallocated",
    "used": rf"this process has {AMOUNT} memory in use",
    "free": rf"of which {AMOUNT} is free",
    "total": rf"total capacity of {AMOUNT}",
}
"""What torch says when an allocation fails."""


def memory_row(record: dict[str, Any] | None, rank: int) -> dict[str, Any]:
    """The columns of `summary.csv` on memory, of one rank; NaN if there is no record or it does not say."""
    rows = record.get("memory", []) if record else []
    figures: dict[str, Any] = next((row for row in rows if row["rank"] == rank), {})
    row = {column: figures.get(column) for column in COLUMNS["memory"]}
    row["model_states_bytes"] = _sum(figures, [f"{component}_bytes" for component in COMPONENTS])
    row["expected_model_states_bytes"] = _sum(figures, [f"expected_{component}_bytes" for component in SHARDABLE])
    return {column: float("nan") if value is None else value for column, value in row.items()}


def memory_timeline(record: dict[str, Any] | None, rank: int) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Memory samples of a rank's recorded step, and the step's phases; None if the record has none.

    Returns:
        Samples: columns ms, where, one for each of `COMPONENTS` (bytes), `COMMUNICATION` (gathered units and buckets,
        which are not in `COMPONENTS` then; NaN in records that lack it), `OTHER` (the most bytes allocated beyond these
        since the sample before) and total (all together). Phases: columns name, start_ms, end_ms.
    """
    rows = record.get("memory", []) if record else []
    at_rest: dict[str, Any] = next((row for row in rows if row["rank"] == rank), {})
    if not (timeline := at_rest.get("timeline")):
        return None
    frame = pd.DataFrame({name: timeline[name] for name in ("ms", "where")})
    for component in COMPONENTS:
        frame[component] = timeline[f"{component}_bytes"]
    states = frame[list(COMPONENTS)].sum(axis="columns")
    frame["total"] = pd.Series(timeline["highest_bytes"]).clip(lower=states)
    frame[OTHER] = frame["total"] - states
    frame[COMMUNICATION] = float("nan")
    if communication := timeline.get("communication_bytes"):
        # parameters exceed what is kept between steps by gathered units; the other buffers hold gradients
        frame[COMMUNICATION] = communication
        gathered = (frame["parameters"] - at_rest["parameters_bytes"]).clip(0, frame[COMMUNICATION])
        frame["parameters"] -= gathered
        frame["gradients"] -= frame[COMMUNICATION] - gathered
    return frame, pd.DataFrame(timeline["phases"], columns=["name", "start_ms", "end_ms"])


def memory_parts(record: dict[str, Any] | None) -> pd.DataFrame:
    """What memory went to at the peak of the recorded step, in bytes; a row a rank whose record has a timeline.

    Returns:
        Columns rank, those of `COMPONENTS`, `COMMUNICATION`, `OTHER`, `CACHED` (free, in torch's allocator), `OUTSIDE`
        (outside torch's allocator; on a CPU, all of the process but tensors; NaN if unknown) and limit.
    """
    rows = []
    for row in record["memory"] if record else []:
        if timeline := memory_timeline(record, row["rank"]):
            frame, reserved = timeline[0], row["peak_reserved_bytes"]
            peak = frame.iloc[int(frame["total"].to_numpy().argmax())]
            of_torch = peak["total"] if reserved is None else reserved
            used = row["peak_rss_bytes"] if reserved is None else row["device_used_bytes"] or float("nan")
            parts = {CACHED: of_torch - peak["total"], OUTSIDE: used - of_torch, "limit": row["limit_bytes"]}
            rows.append({"rank": row["rank"], **peak[[*COMPONENTS, COMMUNICATION, OTHER]], **parts})
    return pd.DataFrame(rows, columns=["rank", *COMPONENTS, COMMUNICATION, OTHER, CACHED, OUTSIDE, "limit"])


def failed_allocation(record: dict[str, Any] | None) -> dict[str, float]:
    """The figures of `OUT_OF_MEMORY` in bytes, for a run that ended out of memory; empty for other runs."""
    message = str(record["ended"].get("message") or "") if record else ""
    matches = {name: re.search(pattern, message) for name, pattern in OUT_OF_MEMORY.items()}
    return {name: float(match[1]) * UNITS[match[2]] for name, match in matches.items() if match and matches["request"]}


def _sum(row: dict[str, Any], names: list[str]) -> int | None:
    values = [row.get(name) for name in names]
    return None if None in values else sum(value for value in values if value is not None)
