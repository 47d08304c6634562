"""The collectives that NCCL or RCCL ran on a device, from their kernels and from what the host said of them.

What a trace says differs by era:

- Since 2024 a kernel carries `Collective name`, `In msg nelems`, `dtype`, `Process Group Name` and so on; or the event
  `record_param_comms` has them, which the kernel names by `External id`.
- Before that, the `c10d::` operator around the launch, on the launching thread, has the kind. It has the sizes too if
  shapes were recorded. Very old traces have only an `nccl:` span there.
- A kernel that was launched by a graph has only its name.

The name of a kernel says little: all-to-all runs as `SendRecv`, and RCCL calls everything `Generic`.
"""

from typing import Any

import numpy as np
import pandas as pd

from ddp_lab.analysis.traces.collectives import (
    COLUMN_TYPES,
    COLUMNS,
    ITEM_BYTES,
    dtype_of,
    enclosing,
    groups_of,
    only_group,
    shown,
    tensor_sizes,
)
from ddp_lab.analysis.traces.reading import COLLECTIVE_KERNEL
from ddp_lab.collectives.kinds import ENDS, MESSAGE, kind_of

LONGEST_NAME = 4000
"""Characters that are kept of a group's ranks, and of its name."""


def device_collectives(
    kernels: pd.DataFrame, events: pd.DataFrame, info: dict[str, Any], world_size: int
) -> pd.DataFrame:
    """The columns of `collectives.COLUMNS`, a row a call. What the trace does not say is NaN, or empty.

    NCCL may run one call as several kernels. They are one row, from the start of the first to the end of the last.

    Args:
        kernels: Device events of `RankTrace.events`.
        events: All of them.
        info: The trace's `distributedInfo`. Calls for which the trace names no group are of the only one. If there are
            several, or such calls ran on several streams, their group is unknown: each group has a stream of its own.
        world_size: The size of a group of all ranks; 0 if unknown.
    """
    # what the host said of each call
    described = {
        operator: args
        for args in events.loc[events["name"] == "record_param_comms", "args"]
        if isinstance(args, dict) and "Collective name" in args and (operator := _integer(args, "External id")) >= 0
    }
    groups, group = {name: str(ranks) for name, ranks in groups_of(info)}, only_group(info)
    kernels = kernels[kernels["name"].str.match(COLLECTIVE_KERNEL)]
    launches = kernels[["launcher", "launch"]].set_axis(["thread", "start"], axis="columns")
    names = events["name"]
    operators, spans = (
        enclosing(launches, events[names.str.startswith(prefix) & (names != "nccl:coalesced")])  # of unknown content
        for prefix in ("c10d::", "nccl:")
    )
    # a row a call
    rows: dict[int, list[Any]] = {}
    ran: list[Any] = list(kernels.itertuples())
    for number, (kernel, call, span) in enumerate(zip(ran, operators, spans, strict=True)):
        args: dict[str, Any] = kernel.args if isinstance(kernel.args, dict) else {}
        issuer = _integer(args, "External id")
        key = issuer if issuer in described else -1 - number
        if key in rows:
            rows[key][2] = max(rows[key][2], kernel.end)
            continue
        args = {**described.get(issuer, {}), **args}
        name = names[call if call >= 0 else span if span >= 0 else kernel.Index]
        kind = _kind(str(args.get("Collective name") or name))
        size = max(_integer(args, "Group size"), 0) or np.nan
        payload, dtype = _payload(args, kind, size, events["args"][call] if call >= 0 else None)
        rows[key] = [
            kind,
            kernel.start,
            kernel.end,
            payload,
            shown(_group_name(args, groups), world_size),
            size,
            dtype,
            f"stream {args.get('stream', '?')}",
            kernel.launch,
            "",
        ]
    table = pd.DataFrame(rows.values(), columns=COLUMNS).astype(COLUMN_TYPES)
    # calls without a group
    nameless = table["group"] == ""
    if group and table.loc[nameless, "stream"].nunique() == 1:
        table.loc[nameless, "group"] = group
        table.loc[nameless & table["group_size"].isna(), "group_size"] = world_size or np.nan
    return table


def _kind(name: str) -> str:
    """`batch_op_issue` is ProcessGroupNCCL2's group of messages, `cross_device_reduce` vLLM's all-reduce."""
    kind = kind_of(name.replace("cross_device_reduce", "all_reduce"))
    return MESSAGE if kind in ENDS or "batch_op" in name else kind or "other"


def _payload(args: dict[str, Any], kind: str, group_size: float, call_args: Any) -> tuple[float, str]:
    """Bytes by nccl-tests' definition, and the dtype; NaN and empty if it is unknown.

    Args:
        args: Of the kernel and its `record_param_comms`.
        call_args: Of the `c10d::` operator. It counts if the others have no sizes.
    """
    dtype = str(args.get("dtype", "")).lower()
    parts = [_integer(args, f"{way} msg nelems") for way in ("In", "Out")]
    if max(parts) < 0:
        dtype = dtype_of(call_args)
        parts = [sum(tensor_sizes(call_args, position)) for position in (0, 1)]
    elements: float = max(parts)
    if kind in ("scatter", "gather") and min(parts) <= 0:  # not the root: it has its share alone
        elements *= group_size
    if kind == MESSAGE and "batch" in str(args.get("Collective name")):
        elements = sum(parts)
    return elements * ITEM_BYTES.get(dtype, np.nan), dtype if dtype in ITEM_BYTES else ""


def _integer(args: dict[str, Any], name: str) -> int:
    """A whole number among an event's arguments; -1 if it is missing or not a whole number."""
    value = args.get(name)
    return value if isinstance(value, int) else -1


def _group_name(args: dict[str, Any], groups: dict[str, str]) -> str:
    """The process group of an NCCL kernel: its ranks and its name, since two groups may have the same ranks.

    Coalesced calls, and all of ProcessGroupNCCL2, do not name the ranks; nor does a kernel all ranks of a large group.
    """
    ranks, name = (str(args.get(f"Process Group {part}", "")).strip("[]") for part in ("Ranks", "Name"))
    if not ranks or "..." in ranks:
        ranks = groups.get(name, "").strip("[]") or ranks
    parts = (("ranks", ranks), ("group", name))
    return ", ".join(f"{part} {value[:LONGEST_NAME]}" for part, value in parts if value)
