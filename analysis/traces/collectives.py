"""The collectives that ran: kind, payload, start and end. Here from Gloo's spans; `nccl` has those of devices."""

from collections import deque
from typing import Any

import numpy as np
import pandas as pd

from analysis.traces.gloo_operators import (
    OPERATORS,
    Issued,
    dtype_of,
    payload_elements,
    scatter_root,
    sends_scatter,
    sizes_of_spans,
    span_elements,
)

COLUMNS = ["kind", "start", "end", "bytes", "group", "group_size", "dtype", "stream", "issued"]
EVERYBODY = "all ranks"
"""The name of the only process group in a trace that names none."""
COLUMN_TYPES = {"bytes": float, "issued": float, "group": str, "group_size": float}
ITEM_BYTES = {
    name: size
    for size, names in {
        8: ("double", "long", "long int", "int64"),
        4: ("float", "float32", "int", "int32"),
        2: ("half", "c10::half", "float16", "bfloat16", "c10::bfloat16", "short"),
        1: ("byte", "unsigned char", "char", "signed char", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"),
    }.items()
    for name in names
}
"""Bytes an element, by the names that the profiler gives to dtypes."""

KINDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "reduce": "reduce",
    "send_recv": "send or receive",
    "other": "other",
}
"""The kinds that tables show, in display order, and how people call them; barriers and gathers are `other`."""


def only_group(info: dict[str, Any]) -> str:
    """`EVERYBODY` if all groups in a trace's `distributedInfo` have the same ranks; empty if they differ.

    Events of Gloo and of old NCCL do not name their group. Groups of one rank do not communicate, so they do not count.
    """
    groups = info.get("pg_config")
    sets = [group.get("ranks") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    distinct = {str(ranks) for ranks in sets if isinstance(ranks, list) and len(ranks) > 1}
    return EVERYBODY if len(distinct) <= 1 else ""


def gloo_collectives(events: pd.DataFrame, world_size: int, group: str = EVERYBODY) -> pd.DataFrame:
    """Columns kind, start, end, bytes, group, group_size, dtype, stream, issued; a row for each `c10d::` call.

    A call belongs to the first span of its name and size that began after it and that no earlier call has taken. The
    size is needed because two Gloo threads may start their work in either order. A span of a scatter from which this
    rank only receives shows no size, so for several of them at once their order decides. Calls without a recorded
    span are left out.

    Args:
        world_size: 0 if unknown.
        group: From `only_group`. If it is unknown, so are its size and the payload of collectives that split a tensor
            over ranks.
    """
    calls = list(events[events["name"].isin(OPERATORS)].sort_values("start", kind="stable").itertuples())
    waiting: dict[tuple[str, int], deque[Any]] = {}
    for span in events[events["name"].str.startswith("gloo:")].sort_values("start", kind="stable").itertuples():
        waiting.setdefault((str(span.name), span_elements(span.args)), deque()).append(span)
    spans = [_take_spans(call, OPERATORS[str(call.name)], world_size, waiting) for call in calls]
    dtypes = _dtypes(calls, spans)
    rows = []
    for call, taken, dtype in zip(calls, spans, dtypes, strict=True):
        if taken:
            issued = OPERATORS[str(call.name)]
            item_bytes = 0 if issued.position is None else ITEM_BYTES.get(dtype, np.nan)
            payload = float(payload_elements(call.args, issued, world_size) * item_bytes)
            start, end = min(span.start for span in taken), max(span.end for span in taken)
            size = world_size if group and world_size else np.nan
            if issued.is_share and not (group and world_size):
                payload = np.nan
            rows.append([issued.kind, start, end, payload, group, size, dtype, f"gloo {taken[0].tid}", call.start])
    return pd.DataFrame(rows, columns=COLUMNS).astype(COLUMN_TYPES)


def _take_spans(call: Any, issued: Issued, world_size: int, waiting: dict[tuple[str, int], deque[Any]]) -> list[Any]:
    """The spans of a call, taken out of `waiting`; none if one of them was not recorded."""
    taken = []
    for size in sizes_of_spans(call.args, issued, world_size) or [0]:
        queue = waiting.get((issued.span, size), deque())
        while queue and queue[0].start < call.start:
            queue.popleft()  # its call came before the trace began
        if not queue:
            return []
        taken.append(queue.popleft())
    return taken


def _dtypes(calls: list[Any], spans: list[list[Any]]) -> list[str]:
    """The dtype of each call, from its span; empty if unknown.

    The span of a scatter from which this rank only receives does not show it. But a reduce-scatter over Gloo is one
    scatter from each rank in turn. So the scatter from this rank, which shows it, is as many calls away as this rank is
    from the sender.
    """
    dtypes = [dtype_of(taken[0].args) if taken else "" for taken in spans]
    scatters = [index for index, call in enumerate(calls) if call.name == "c10d::scatter_"]
    own = next((scatter_root(calls[index].args) for index in scatters if sends_scatter(calls[index].args)), -1)
    for place, index in enumerate(scatters):
        partner = place + own - scatter_root(calls[index].args)
        if not dtypes[index] and own >= 0 and 0 <= partner < len(scatters):
            other = calls[scatters[partner]]
            issued = OPERATORS["c10d::scatter_"]
            if payload_elements(other.args, issued, 1) == payload_elements(calls[index].args, issued, 1):
                dtypes[index] = dtypes[scatters[partner]]
    return dtypes
