"""The collectives that Gloo ran, from the spans of its threads and the calls that issued them.

A call is a `c10d::` operator on the thread that issues it. Our runs leave a mark in it that names the collective and
its group, as `issued all_reduce #17 of 1000 float32 in ranks 0,2, tp` (`ddp_lab.runtime.watch.sequence`). Other traces
do not say in which group it ran, nor the dtype of a scatter from which a rank only receives.

Over Gloo, some collectives are made of others: of a scatter or a broadcast from each rank. Our runs leave an event
around the parts, `composed reduce_scatter of 2 scatters` (`composed` in `ddp_lab.strategy.communication.collectives`).
"""

import re
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pandas as pd

from ddp_lab.analysis.traces.collectives import (
    COLUMN_TYPES,
    COLUMNS,
    EVERYBODY,
    ITEM_BYTES,
    dtype_of,
    enclosing,
    ranks_of,
    shown,
    tensor_sizes,
)
from ddp_lab.collectives.kinds import ENDS, MESSAGE, kind_of

GLOO, MARK, COMPOSED = "gloo:", "issued ", "composed "
MARK_NAME = MARK + r"\w+ #\d+ of \d+ (?P<dtype>\w*) in (?P<group>.*)"
COMPOSED_NAME = re.compile(
    COMPOSED + r"(?P<kind>all_gather|reduce_scatter) of (?P<parts>(?P<count>\d{1,6}) (?:scatter|broadcast)s?)"
)
ROOT = re.compile(r"(?:, root \d+| root \d+).*")
"""The end of the name of a group of one root, after the name of the group that it was made from."""
OF_LISTS, OF_TENSORS = "c10d::reduce_scatter_", "c10d::reduce_scatter_tensor_coalesced_"
"""Operators that have several spans: one for each rank, and one for each tensor."""
SECOND = frozenset(("all_gather", "all_to_all", "gather", "reduce_scatter"))
"""Kinds of which the span shows the operator's second argument, not its first."""
SHARES = frozenset(("all_gather", "gather", "scatter"))
"""Kinds of which that argument is one rank's share: the payload is that times the number of ranks."""


def gloo_collectives(events: pd.DataFrame, world_size: int, group: str = EVERYBODY) -> tuple[pd.DataFrame, list[str]]:
    """The columns of `COLUMNS`, a row for each call, or for all calls that make one collective (`_composed`). And a
    sentence if a span is missing between others.

    A call belongs to the first span of its kind and size that began after it, on a thread of its group, and that no
    earlier call has taken. The size is needed because two Gloo threads may start their work in either order. A span of
    a scatter from which this rank only receives shows no size. Calls without a recorded span are left out.

    Args:
        world_size: 0 if unknown.
        group: Of calls without a mark, from `only_group`. If the group of a call is unknown, so are its size and the
            payload of collectives that split a tensor over ranks.
    """
    # calls and spans
    calls = _calls(events, world_size, group)
    waiting, groups = _spans(events, calls)
    around = enclosing(calls, events[events["name"].str.startswith(COMPOSED)])
    composites: dict[int, list[dict[str, Any]]] = defaultdict(list)
    began = []
    issued: list[Any] = list(calls.itertuples())
    # a row a call, by the collective that it is a part of
    for call, composite in zip(issued, around, strict=True):
        spans = _take(call, waiting, groups)
        began.append(max((span.start for span in spans), default=np.nan))
        if not spans:
            continue
        dtype = dtype_of(spans[0].args) or call.dtype
        row = [
            MESSAGE if call.kind in ENDS else call.kind,
            min(span.start for span in spans),
            max(span.end for span in spans),
            0.0 if call.kind == "barrier" else call.elements * ITEM_BYTES.get(dtype, np.nan),
            call.group,
            len(ranks_of(call.group, world_size)) or np.nan,
            dtype,
            f"gloo {spans[0].thread.split()[1]}",
            call.start,
            "",
        ]
        composites[composite if composite >= 0 else call.Index].append(dict(zip(COLUMNS, row, strict=True)))
    # a row a collective, and spans that are missing
    rows = [row for label, parts in composites.items() for row in _composed(str(events["name"][label]), parts)]
    # A call that was under way when the trace ended has no span either, but then no later call like it has one.
    latest = calls.assign(began=began).groupby(["kind", "group", "spans"])["began"].transform("max")
    lost = int((np.isnan(began) & (latest > calls["start"])).sum())
    note = f"collectives that Gloo ran are not in the trace ({lost}), so others like them have the times of later ones"
    return pd.DataFrame(rows, columns=COLUMNS).astype(COLUMN_TYPES), [note] * bool(lost)


def _calls(events: pd.DataFrame, world_size: int, group: str) -> pd.DataFrame:
    """The operators that issue collectives, with their kind, group and dtype, and their `_sizes`."""
    calls = events[events["name"].str.startswith("c10d::")]
    calls = calls.assign(kind=calls["name"].map(kind_of), group=group, dtype="")
    calls = calls[calls["kind"] != ""]
    marks = events[events["name"].str.startswith(MARK)]
    told = marks["name"].str.extract(MARK_NAME).set_index(enclosing(marks, calls))
    told["group"] = [shown(str(name), world_size) for name in told["group"]]
    calls.update(told[~told.index.duplicated()])
    issued: list[Any] = list(calls.itertuples())
    sizes = [_sizes(call, len(ranks_of(call.group, world_size)), world_size) for call in issued]
    columns = pd.DataFrame(sizes, calls.index, ["elements", "spans"])
    return calls.join(columns)


def _sizes(call: Any, ranks: int, world_size: int) -> tuple[float, tuple[int, ...]]:
    """Elements of a call's payload, and those that each of its spans shows.

    Args:
        ranks: Of its group; 0 if unknown, and then `world_size` stands for it in the spans.
    """
    is_list, members = call.name == OF_LISTS, ranks or world_size
    position = 1 if call.kind in SECOND and not is_list else 0
    sizes = tensor_sizes(call.args, position) if call.kind != "barrier" else []
    spans = tuple(sizes) if call.name == OF_TENSORS else (sum(sizes),) * (members if is_list else 1)
    if call.kind == "scatter":  # the root's span shows all that it sends, the others' spans show nothing
        kinds = call.args.get("Input type") if isinstance(call.args, dict) else None
        sends = isinstance(kinds, list) and len(kinds) > 1 and kinds[1] != "ScalarList"
        spans = (sum(sizes) * members * sends,)
    is_share = is_list or call.kind in SHARES
    return sum(sizes) * ((ranks or np.nan) if is_share else 1), spans


def _spans(events: pd.DataFrame, calls: pd.DataFrame) -> tuple[dict[Any, list[Any]], dict[str, set[str]]]:
    """The spans by kind and elements, in order of start; and the groups that each Gloo thread may serve.

    A group has threads of its own. So a thread serves a group that issues everything that the thread ran. It does not
    serve a group whose calls of some kind and size all have spans on threads that can serve no other group.
    """
    everything = set(calls["group"])
    issuing: dict[Any, Counter[str]] = defaultdict(Counter)
    issued: list[Any] = list(calls.itertuples())
    for call in issued:
        for size in call.spans:
            issuing[_on_gloo(call.kind), size][call.group] += 1
    waiting: dict[Any, list[Any]] = defaultdict(list)
    groups: dict[str, set[str]] = {}
    spans: list[Any] = list(events[events["name"].str.startswith(GLOO)].itertuples())
    for span in spans:
        dims = span.args.get("Input Dims") if isinstance(span.args, dict) else None
        size = sum(sum(tensor_sizes(span.args, place)) for place in range(len(dims) if isinstance(dims, list) else 0))
        key = _on_gloo(kind_of(span.name)), size
        waiting[key].append(span)
        of_thread = groups.get(span.thread, everything)
        groups[span.thread] = of_thread & set(issuing[key] or everything) or of_thread
    for key, spans_alike in waiting.items():
        certain = Counter(tuple(groups[span.thread]) for span in spans_alike)
        complete = {group for group, count in issuing[key].items() if certain[group,] >= count}
        for span in spans_alike:
            groups[span.thread] = groups[span.thread] - complete or groups[span.thread]
    return waiting, groups


def _on_gloo(kind: str) -> str:
    """Gloo runs a reduce-scatter as an all-reduce."""
    return "all_reduce" if kind == "reduce_scatter" else kind


def _take(call: Any, waiting: dict[Any, list[Any]], groups: dict[str, set[str]]) -> list[Any]:
    """The spans of a call, taken out of `waiting`; none if one of them was not recorded."""
    matched = []
    for size in call.spans:
        spans = waiting[_on_gloo(call.kind), size]
        fitting = (i for i, span in enumerate(spans) if span.start >= call.start and call.group in groups[span.thread])
        place = next(fitting, None)
        if place is None:
            return []
        matched.append(spans.pop(place))
    return matched


def _composed(name: str, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The collective in the place of its `parts`, rows in order of issue; none if one of these is missing.

    It runs from the start of the first to the end of the last, and its payload is the whole tensor: the sum of what is
    broadcast, and what each root scatters.
    """
    match = COMPOSED_NAME.fullmatch(name)
    if not match:
        return parts
    if len(parts) != int(match["count"]):
        return []
    first, sizes = parts[0], [part["bytes"] for part in parts]
    return [
        first
        | {
            "kind": match["kind"],
            "made_of": match["parts"],
            "start": min(part["start"] for part in parts),
            "end": max(part["end"] for part in parts),
            "bytes": sum(sizes) if match["kind"] == "all_gather" else max(sizes),
            "group": ROOT.sub("", first["group"]),
        }
    ]
