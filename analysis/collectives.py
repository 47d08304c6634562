"""The collectives that really ran: kind, payload, start and end, from Gloo spans or from NCCL kernels."""

import re
from typing import Any

import numpy as np
import pandas as pd

COLUMNS = ["kind", "start", "end", "bytes", "group_size", "dtype", "stream", "issued"]
ITEM_BYTES = {
    "float": 4,
    "double": 8,
    "half": 2,
    "c10::half": 2,
    "bfloat16": 2,
    "c10::bfloat16": 2,
    "int": 4,
    "long int": 8,
    "long": 8,
    "unsigned char": 1,
    "signed char": 1,
    "byte": 1,
    "bool": 1,
    "short": 2,
    "float32": 4,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "float16": 2,
}
"""Bytes an element, by the names that the profiler gives to dtypes."""

ISSUING_OPERATORS = {
    "c10d::allreduce_": ("all_reduce", "gloo:all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", "gloo:all_reduce", 0),
    "c10d::broadcast_": ("broadcast", "gloo:broadcast", 0),
    "c10d::allgather_": ("all_gather", "gloo:all_gather", 1),
    "c10d::_allgather_base_": ("all_gather", "gloo:all_gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "gloo:all_reduce", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", "gloo:all_reduce", 1),
    "c10d::alltoall_base_": ("all_to_all", "gloo:all_to_all", 1),
    "c10d::alltoall_": ("all_to_all", "gloo:all_to_all", 1),
    "c10d::reduce_": ("reduce", "gloo:reduce", 0),
    "c10d::gather_": ("gather", "gloo:gather", 1),
    "c10d::scatter_": ("scatter", "gloo:scatter", 1),
    "c10d::barrier": ("barrier", "gloo:barrier", None),
}
"""Operator on the calling thread: what it is, the name of its span on a Gloo thread (where reduce-scatter is an
all-reduce inside), and which of its arguments the span shows the shape of."""

NCCL_KINDS = (
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("broadcast", "broadcast"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("reduce", "reduce"),
)


def gloo_collectives(events: pd.DataFrame, world_size: int) -> pd.DataFrame:
    """Columns kind, start, end, bytes, group_size, dtype, stream, issued; a row for each `c10d::` call.

    A call is matched with the first span of its name and size that no earlier call has taken: Gloo's threads take work
    in the order in which it is issued, but two of them may start theirs in either order. Calls whose span was not
    recorded are left out.
    """
    calls = events[events["name"].isin(ISSUING_OPERATORS)].sort_values("start")
    spans = events[events["name"].str.startswith("gloo:")].sort_values("start")
    waiting: dict[tuple[str, int], list[Any]] = {}
    for span in spans.itertuples():
        waiting.setdefault((str(span.name), _elements(span.args, 0)), []).append(span)
    rows = []
    for call in calls.itertuples():
        kind, span_name, position = ISSUING_OPERATORS[str(call.name)]
        queue = waiting.get((span_name, 0 if position is None else _elements(call.args, position)))
        if not queue:
            continue
        span = queue.pop(0)
        dtype = _dtype(span.args)
        size = float(_elements(span.args, 0) * ITEM_BYTES.get(dtype, np.nan))
        payload = size * world_size if kind == "all_gather" else size
        rows.append([kind, span.start, span.end, payload, world_size, dtype, f"gloo {span.tid}", call.start])
    return pd.DataFrame(rows, columns=COLUMNS).astype({"bytes": float, "issued": float})


def device_collectives(kernels: pd.DataFrame) -> pd.DataFrame:
    """The same, from NCCL kernels, which have a column `launch` beside their own times.

    `bytes` is NaN where the trace does not carry message sizes."""
    rows = []
    for kernel in kernels[kernels["name"].str.match(r"(?i)^nccl.*kernel")].itertuples():
        args: dict[str, Any] = kernel.args if isinstance(kernel.args, dict) else {}
        plain = re.sub(r"[^a-z]", "", str(args.get("Collective name", kernel.name)).lower())
        kind = next((kind for pattern, kind in NCCL_KINDS if pattern in plain), "other")
        dtype = str(args.get("dtype", "")).lower()
        elements = max(args.get("In msg nelems", -1), args.get("Out msg nelems", -1))
        payload = elements * ITEM_BYTES[dtype] if elements >= 0 and dtype in ITEM_BYTES else np.nan
        stream = f"stream {args.get('stream', '?')}"
        rows.append([kind, kernel.start, kernel.end, payload, args.get("Group size"), dtype, stream, kernel.launch])
    return pd.DataFrame(rows, columns=COLUMNS).astype({"bytes": float, "issued": float})


def _dtype(args: Any) -> str:
    kinds = args.get("Input type") if isinstance(args, dict) else None
    return str(kinds[0]).lower() if kinds else ""


def _elements(args: Any, position: int) -> int:
    """Elements of the tensor at `position` in `Input Dims`; 0 where the trace does not carry shapes."""
    dims = args.get("Input Dims") if isinstance(args, dict) else None
    if not dims or len(dims) <= position:
        return 0
    return sum(int(np.prod(shape)) for shape in _shapes(dims[position]))


def _shapes(entry: Any) -> list[list[int]]:
    """A shape, or a list of shapes (of a TensorList), as a list of shapes."""
    if not isinstance(entry, list):
        return []
    if entry and isinstance(entry[0], list):
        return [shape for part in entry for shape in _shapes(part)]
    return [entry]
