"""Memory, from run records: figures by rank, and the timeline of the recorded step."""

from typing import Any

import pandas as pd

from ddp_lab.analysis.columns import COMPONENTS, MEMORY_COLUMNS, SHARDABLE

OTHER = "activations and temporaries"


def memory_row(record: dict[str, Any] | None, rank: int) -> dict[str, Any]:
    """The columns `MEMORY_COLUMNS` of one rank; NaN if there is no record or it does not say."""
    rows = record.get("memory", []) if record else []
    held: dict[str, Any] = next((row for row in rows if row["rank"] == rank), {})
    row = {column: held.get(column) for column in MEMORY_COLUMNS}
    row["model_states_bytes"] = _sum(held, [f"{component}_bytes" for component in COMPONENTS])
    row["expected_model_states_bytes"] = _sum(held, [f"expected_{component}_bytes" for component in SHARDABLE])
    return {column: float("nan") if value is None else value for column, value in row.items()}


def memory_timeline(record: dict[str, Any] | None, rank: int) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Memory samples of a rank's recorded step, and the step's phases; None if the record has none.

    Returns:
        Samples: columns ms, where, one for each of `COMPONENTS` (bytes), `OTHER` (the most bytes allocated beyond these
        since the sample before) and total (all together). Phases: columns name, start_ms, end_ms.
    """
    rows = record.get("memory", []) if record else []
    timeline = next((row.get("timeline") for row in rows if row["rank"] == rank), None)
    if not timeline:
        return None
    frame = pd.DataFrame({name: timeline[name] for name in ("ms", "where")})
    for component in COMPONENTS:
        frame[component] = timeline[f"{component}_bytes"]
    states = frame[list(COMPONENTS)].sum(axis="columns")
    frame["total"] = pd.Series(timeline["highest_bytes"]).clip(lower=states)
    frame[OTHER] = frame["total"] - states
    return frame, pd.DataFrame(timeline["phases"], columns=["name", "start_ms", "end_ms"])


def _sum(row: dict[str, Any], names: list[str]) -> int | None:
    values = [row.get(name) for name in names]
    return None if None in values else sum(value for value in values if value is not None)
