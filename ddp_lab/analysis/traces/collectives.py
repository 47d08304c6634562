"""What the collectives of `gloo` and `nccl` share: the columns of their table, names of groups, and dtypes."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddp_lab.collectives import ranks
from ddp_lab.collectives.kinds import sent_share
from ddp_lab.collectives.ranks import NAMED, Ranks

COLUMNS = ["kind", "start", "end", "bytes", "group", "group_size", "dtype", "stream", "issued", "made_of"]
COLUMN_TYPES = {"bytes": float, "issued": float, "group": str, "group_size": float}
ITEM_BYTES = {
    name: size
    for size, names in {
        8: ("double", "float64", "long", "long int", "int64"),
        4: ("float", "float32", "int", "int32"),
        2: ("half", "c10::half", "float16", "bfloat16", "c10::bfloat16", "short", "int16"),
        1: ("byte", "unsigned char", "char", "signed char", "uint8", "int8", "bool", "float8_e4m3fn", "float8_e5m2"),
    }.items()
    for name in names
}
"""Bytes an element, by the names that the profiler and torch give to dtypes."""
EVERYBODY = "all ranks"
"""The name of the only process group in a trace that names none, and of one of all ranks."""


def sent_bytes(calls: pd.DataFrame) -> "pd.Series[float]":
    """What a rank sends in each call, by `sent_share`. NaN where size or group is unknown."""
    shares = [sent_share(kind, ranks) for kind, ranks in zip(calls["kind"], calls["group_size"], strict=True)]
    return calls["bytes"] * np.array(shares, dtype=float)


def only_group(info: dict[str, Any]) -> str:
    """`EVERYBODY` if all groups in a trace's `distributedInfo` have the same ranks; empty if they differ.

    For events that do not name their group: those of old NCCL, and of Gloo in traces that are not ours. Groups of one
    rank do not communicate, so they do not count.
    """
    distinct = {str(ranks) for _, ranks in groups_of(info) if isinstance(ranks, list) and len(ranks) > 1}
    return EVERYBODY if len(distinct) <= 1 else ""


def groups_of(info: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name and ranks of each process group in a trace's `distributedInfo`."""
    groups = info.get("pg_config")
    named = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return [(str(group.get("pg_name")), group.get("ranks", "")) for group in named]


def shown(name: str, world_size: int) -> str:
    """A group's name as tables show it: `EVERYBODY` in the place of all ranks."""
    match = NAMED.fullmatch(name)
    return EVERYBODY + match["rest"] if match and len(ranks_of(name, world_size)) == world_size else name


def ranks_of(name: str, world_size: int) -> Ranks:
    """The ranks of a group with this name; empty if it does not say."""
    return Ranks(range(world_size)) if name.startswith(EVERYBODY) else ranks.ranks_of(name)


def enclosing(moments: pd.DataFrame, events: pd.DataFrame) -> NDArray[np.int64]:
    """For each of `moments` (columns thread, start), the label of the event that had begun last on its thread and was
    still under way; -1 if there is none. Both are in order of start."""
    begun = events.reset_index(names="label")[["thread", "start", "end", "label"]]
    lookups = moments[["thread", "start"]].reset_index(drop=True).dropna().astype({"thread": str})
    lookups = lookups.sort_values("start").reset_index(names="place")
    latest = pd.merge_asof(lookups, begun, on="start", by="thread").set_index("place")
    labels = latest["label"].where(latest["end"] >= latest["start"])
    return labels.reindex(range(len(moments))).fillna(-1).to_numpy(dtype=np.int64)


def tensor_sizes(args: Any, position: int) -> list[int]:
    """Elements of each tensor in an operator's argument at `position`: of a tensor, or of a list of them."""
    dims = args.get("Input Dims") if isinstance(args, dict) else None
    if not isinstance(dims, list) or len(dims) <= position:
        return []
    kinds = args.get("Input type")
    kind = str(kinds[position]) if isinstance(kinds, list) and len(kinds) > position else ""
    if dims[position] == [] and kind in ("", "Scalar", "ScalarList", "TensorList", "GenericList"):
        return []  # not a tensor; an empty entry with a dtype is the shape of a 0-d tensor
    return _sizes(dims[position])


def _sizes(entry: Any) -> list[int]:
    """Elements by shape, of one or of a list of them. An empty shape is that of a 0-d tensor."""
    if not isinstance(entry, list):
        return []
    if entry and isinstance(entry[0], list):
        return [size for part in entry for size in _sizes(part)]
    return [int(np.prod(entry))] if all(type(size) is int and size >= 0 for size in entry) else []


def dtype_of(args: Any) -> str:
    """Name of the first tensor's dtype; empty where the trace does not carry it."""
    kinds = args.get("Input type") if isinstance(args, dict) else None
    return str(kinds[0]).lower() if isinstance(kinds, list) and kinds else ""
