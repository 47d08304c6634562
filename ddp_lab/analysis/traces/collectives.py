"""The collectives that ran: kind, payload, start and end. Here from Gloo's spans; `nccl` has those of devices."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ddp_lab.analysis.traces.gloo_operators import (
    COMPOSED,
    OPERATORS,
    composed_of,
    dtype_of,
    payload_elements,
    scatter_root,
    sends_scatter,
    sizes_of_spans,
    span_elements,
    tensor_sizes,
)
from ddp_lab.analysis.traces.groups import EVERYBODY, call_at, calls_by_thread, marked_groups, ranks_of
from ddp_lab.collectives.kinds import sent_share

COLUMNS = ["kind", "start", "end", "bytes", "group", "group_size", "dtype", "stream", "issued", "made_of"]
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


def sent_bytes(calls: pd.DataFrame) -> "pd.Series[float]":
    """What a rank sends in each call, by `sent_share`. NaN where size or group is unknown."""
    shares = [sent_share(kind, ranks) for kind, ranks in zip(calls["kind"], calls["group_size"], strict=True)]
    return calls["bytes"] * np.array(shares, dtype=float)


def only_group(info: dict[str, Any]) -> str:
    """`EVERYBODY` if all groups in a trace's `distributedInfo` have the same ranks; empty if they differ.

    For events that do not name their group: those of old NCCL, and of Gloo without marks (`groups`). Groups of one rank
    do not communicate, so they do not count.
    """
    groups = info.get("pg_config")
    sets = [group.get("ranks") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    distinct = {str(ranks) for ranks in sets if isinstance(ranks, list) and len(ranks) > 1}
    return EVERYBODY if len(distinct) <= 1 else ""


def gloo_collectives(events: pd.DataFrame, world_size: int, group: str = EVERYBODY) -> tuple[pd.DataFrame, list[str]]:
    """The columns of `COLUMNS`; a row for each `c10d::` call, or for all that are one collective (`composed_of`). And a
    sentence if a span is missing from between others.

    A call belongs to the first span of its name and size that began after it and that no earlier call has taken. The
    size is needed because two Gloo threads may start their work in either order. A span of a scatter from which this
    rank only receives shows no size, so for several of them at once their order decides. Calls without a recorded
    span are left out.

    Args:
        world_size: 0 if unknown.
        group: Of calls without a mark, from `only_group`. If the group of a call is unknown, so are its size and the
            payload of collectives that split a tensor over ranks.
    """
    calls: list[Any] = list(events[events["name"].isin(OPERATORS)].sort_values("start", kind="stable").itertuples())
    marked = marked_groups(events, world_size)
    groups = [marked.get(call.Index, group) for call in calls]
    sizes = {name: len(ranks_of(name, world_size)) for name in set(groups)}
    spans = _spans(events, calls, groups, {name: size or world_size for name, size in sizes.items()})
    dtypes = _dtypes(calls, [ranks_of(name, world_size) for name in groups], spans)
    events_around = calls_by_thread(events, COMPOSED)
    wholes: dict[Any, tuple[str, list[dict[str, Any]]]] = {}
    for call, name, taken, dtype in zip(calls, groups, spans, dtypes, strict=True):
        if taken:
            issued, size = OPERATORS[str(call.name)], sizes[name]
            item_bytes = 0 if issued.position is None else ITEM_BYTES.get(dtype, np.nan)
            payload = float(payload_elements(call.args, issued, size) * item_bytes)
            start, end = min(span.start for span in taken), max(span.end for span in taken)
            if issued.is_share and not size:
                payload = np.nan
            stream = f"gloo {taken[0].tid}"
            row = [issued.kind, start, end, payload, name, size or np.nan, dtype, stream, call.start, ""]
            around = call_at(events_around, f"{call.pid} {call.tid}", call.start)
            whole = wholes.setdefault(
                ("around", around.Index) if around else call.Index, (around.name if around else "", [])
            )
            whole[1].append(dict(zip(COLUMNS, row, strict=True)))
    rows = [row for event, parts in wholes.values() for row in composed_of(event, parts)]
    return pd.DataFrame(rows, columns=COLUMNS).astype(COLUMN_TYPES), _lost(calls, groups, spans)


def _lost(calls: list[Any], groups: list[str], spans: list[list[Any]]) -> list[str]:
    """A call that has no span, while one like it that was issued before has a span that began after this call: the
    earlier call's own span was not recorded, and each since then has the next one's. A call that was under way when the
    trace ended has none either, but no such sign."""
    kinds = [
        (str(call.name), name, str(tensor_sizes(call.args, OPERATORS[str(call.name)].position)))
        for call, name in zip(calls, groups, strict=True)
    ]
    latest: dict[Any, float] = {}
    lost = 0
    for call, kind, taken in zip(calls, kinds, spans, strict=True):
        if taken:
            latest[kind] = max(span.start for span in taken)
        else:
            lost += latest.get(kind, call.start) > call.start
    said = f"collectives that Gloo ran are not in it ({lost}), so others like them have the times of later ones"
    return [said] if lost else []


def _spans(events: pd.DataFrame, calls: list[Any], groups: list[str], sizes: dict[str, int]) -> list[list[Any]]:
    """The spans of each call; none if one of them was not recorded.

    Each group has threads of its own, so calls of two groups that are under way at once can be told apart.

    Args:
        sizes: Ranks by group.
    """
    of_gloo = events[events["name"].str.startswith("gloo:")].sort_values("start", kind="stable")
    spans: list[Any] = list(of_gloo.itertuples())
    ranks = [sizes[name] for name in groups]
    taken = _take_all(calls, ranks, spans, [""] * len(calls), {})
    if len(sizes) < 2:
        return taken
    taken = _take_all(calls, ranks, spans, groups, _groups_of_threads(groups, taken))
    lost = [place for place, own in enumerate(taken) if not own]  # their threads were thought to be another group's
    found = {span.Index for own in taken for span in own}
    rest = [span for span in spans if span.Index not in found]
    again = _take_all([calls[place] for place in lost], [ranks[place] for place in lost], rest, [""] * len(lost), {})
    for place, own in zip(lost, again, strict=True):
        taken[place] = own
    return taken


def _groups_of_threads(groups: list[str], taken: list[list[Any]]) -> dict[Any, str]:
    """The group of each Gloo thread: that of most of its spans, of those if possible that are like no other group's.

    Args:
        taken: The spans of each call, where those of two groups may have been mixed up if they are alike.
    """
    alike: dict[tuple[str, int], set[str]] = {}
    for name, own in zip(groups, taken, strict=True):
        for span in own:
            alike.setdefault((str(span.name), span_elements(span.args)), set()).add(name)
    votes: dict[Any, Counter[str]] = {}
    for name, own in zip(groups, taken, strict=True):
        for span in own:
            is_sure = len(alike[str(span.name), span_elements(span.args)]) == 1
            votes.setdefault(span.tid, Counter())[name] += len(taken) if is_sure else 1
    return {tid: each.most_common(1)[0][0] for tid, each in votes.items()}


def _take_all(
    calls: list[Any], ranks: Sequence[int], spans: list[Any], groups: Sequence[str], threads: dict[Any, str]
) -> list[list[Any]]:
    """What `_spans` says, where `threads` has the group of each Gloo thread that is known."""
    waiting: dict[tuple[str, int, str], deque[Any]] = {}
    for span in spans:
        key = (str(span.name), span_elements(span.args), threads.get(span.tid, ""))
        waiting.setdefault(key, deque()).append(span)
    return [_take(call, size, group, waiting) for call, size, group in zip(calls, ranks, groups, strict=True)]


def _take(call: Any, ranks: int, group: str, waiting: dict[tuple[str, int, str], deque[Any]]) -> list[Any]:
    """The spans of a call, taken out of `waiting`; none if one of them was not recorded."""
    taken, issued = [], OPERATORS[str(call.name)]
    for size in sizes_of_spans(call.args, issued, ranks) or [0]:
        queue = waiting.get((issued.span, size, group), deque())
        while queue and queue[0].start < call.start:
            queue.popleft()  # its call came before the trace began
        if not queue:
            return []
        taken.append(queue.popleft())
    return taken


def _dtypes(calls: list[Any], members: list[tuple[int, ...]], spans: list[list[Any]]) -> list[str]:
    """The dtype of each call, from its span; empty if unknown.

    The span of a scatter from which this rank only receives does not show it. But a reduce-scatter over Gloo is one
    scatter from each rank in turn. So the scatter from this rank, which shows it, is as many calls away as this rank is
    from the sender.

    Args:
        members: The ranks of each call's group.
    """
    dtypes = [dtype_of(taken[0].args) if taken else "" for taken in spans]
    for ranks in set(members):
        scatters = [
            index for index, call in enumerate(calls) if call.name == "c10d::scatter_" and members[index] == ranks
        ]
        own = next((scatter_root(calls[index].args) for index in scatters if sends_scatter(calls[index].args)), -1)
        for place, index in enumerate(scatters):
            partner = place + own - scatter_root(calls[index].args)
            if not dtypes[index] and own >= 0 and 0 <= partner < len(scatters):
                other = calls[scatters[partner]]
                issued = OPERATORS["c10d::scatter_"]
                if payload_elements(other.args, issued, 1) == payload_elements(calls[index].args, issued, 1):
                    dtypes[index] = dtypes[scatters[partner]]
    return dtypes
