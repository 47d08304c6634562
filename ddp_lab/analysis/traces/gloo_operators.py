"""What each `c10d::` operator on a calling thread is, and how it looks on a Gloo thread. And collectives that are made
of others: over Gloo, of a scatter or a broadcast from each rank.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np


class Issued(NamedTuple):
    """What an operator issues.

    Attributes:
        kind: The collective.
        span: The name of its span on a Gloo thread. Gloo runs a reduce-scatter as an all-reduce.
        position: The operator's argument whose shape the span shows.
        is_share: Whether that argument is one rank's share, so that the payload is `world_size` times as large.
        spans: How many spans it has: one in all, one for each tensor of the argument, or one for each rank.
    """

    kind: str
    span: str
    position: int | None
    is_share: bool = False
    spans: Literal["one", "tensors", "ranks"] = "one"


OPERATORS = {
    "c10d::allreduce_": Issued("all_reduce", "gloo:all_reduce", 0),
    "c10d::allreduce_coalesced_": Issued("all_reduce", "gloo:all_reduce", 0),
    "c10d::broadcast_": Issued("broadcast", "gloo:broadcast", 0),
    "c10d::allgather_": Issued("all_gather", "gloo:all_gather", 1, is_share=True),
    "c10d::_allgather_base_": Issued("all_gather", "gloo:all_gather", 1, is_share=True),
    "c10d::allgather_into_tensor_coalesced_": Issued("all_gather", "gloo:all_gather", 1, is_share=True),
    "c10d::_reduce_scatter_base_": Issued("reduce_scatter", "gloo:all_reduce", 1),
    "c10d::reduce_scatter_tensor_coalesced_": Issued("reduce_scatter", "gloo:all_reduce", 1, spans="tensors"),
    "c10d::reduce_scatter_": Issued("reduce_scatter", "gloo:all_reduce", 0, is_share=True, spans="ranks"),
    "c10d::alltoall_base_": Issued("all_to_all", "gloo:all_to_all", 1),
    "c10d::alltoall_": Issued("all_to_all", "gloo:all_to_all", 1),
    "c10d::reduce_": Issued("reduce", "gloo:reduce", 0),
    "c10d::gather_": Issued("gather", "gloo:gather", 1, is_share=True),
    "c10d::scatter_": Issued("scatter", "gloo:scatter", 0, is_share=True),
    "c10d::send": Issued("send_recv", "gloo:send", 0),
    "c10d::recv_": Issued("send_recv", "gloo:recv", 0),
    "c10d::recv_any_source_": Issued("send_recv", "gloo:recvAnySource", 0),
    "c10d::barrier": Issued("barrier", "gloo:barrier", None),
}


PACED, GLOO = "paced::", "gloo:"
"""`--link` (docs/link.md) makes operators `paced::all_reduce` and so on, which last as long as Gloo's spans would over
such links; Gloo's own spans are as they are in memory."""


def with_paced_names(events: list[Any]) -> list[Any]:
    """`events`, which have a `name`, as Gloo would have left them on links: paced ones in the place of Gloo's."""
    named = [(event, str(event.name)) for event in events]
    if not any(name.startswith(PACED) for _, name in named):
        return events
    for event, name in named:
        if name.startswith(PACED):
            event.name = GLOO + name.removeprefix(PACED)
    return [event for event, name in named if not name.startswith(GLOO)]


def payload_elements(args: Any, issued: Issued, world_size: int) -> int:
    """Elements of a call's payload, by nccl-tests' definition; 0 where the trace does not carry shapes."""
    return sum(tensor_sizes(args, issued.position)) * (world_size if issued.is_share else 1)


def sizes_of_spans(args: Any, issued: Issued, world_size: int) -> list[int]:
    """Elements that each Gloo span of a call shows."""
    sizes = tensor_sizes(args, issued.position)
    if issued.spans == "tensors":
        return sizes
    if issued.spans == "ranks":
        return [sum(sizes)] * world_size
    if issued.kind == "scatter":  # the root's span shows all that it sends, the others' spans show nothing
        return [sum(sizes) * world_size if sends_scatter(args) else 0]
    return [sum(sizes)]


def span_elements(args: Any) -> int:
    """Elements of all tensors that a Gloo span shows."""
    dims = args.get("Input Dims") if isinstance(args, dict) else None
    return sum(sum(tensor_sizes(args, position)) for position in range(len(dims))) if isinstance(dims, list) else 0


def sends_scatter(args: Any) -> bool:
    """Whether this rank is the root of a scatter: the others give an empty list of inputs, as their trace shows."""
    kinds = args.get("Input type") if isinstance(args, dict) else None
    return isinstance(kinds, list) and len(kinds) > 1 and kinds[1] != "ScalarList"


def scatter_root(args: Any) -> int:
    """The root of a scatter; -1 where the trace does not carry it."""
    values = args.get("Concrete Inputs") if isinstance(args, dict) else None
    return int(values[3]) if isinstance(values, list) and len(values) > 3 and str(values[3]).isdecimal() else -1


def dtype_of(args: Any) -> str:
    """Name of the first tensor's dtype; empty where the trace does not carry it."""
    kinds = args.get("Input type") if isinstance(args, dict) else None
    return str(kinds[0]).lower() if isinstance(kinds, list) and kinds else ""


def tensor_sizes(args: Any, position: int | None) -> list[int]:
    """Elements of each tensor in the argument at `position`: of a tensor, or of a list of them."""
    dims = args.get("Input Dims") if isinstance(args, dict) else None
    if position is None or not isinstance(dims, list) or len(dims) <= position:
        return []
    kinds = args.get("Input type")
    kind = str(kinds[position]) if isinstance(kinds, list) and len(kinds) > position else ""
    if dims[position] == [] and kind in ("", "Scalar", "ScalarList", "TensorList", "GenericList"):
        return []  # not a tensor; an empty entry with a dtype is the shape of a 0-d tensor
    return [int(np.prod(shape)) for shape in _shapes(dims[position])]


def _shapes(entry: Any) -> Iterator[list[int]]:
    """The shapes in an entry: one, or a list of them. An empty shape is that of a 0-d tensor."""
    if not isinstance(entry, list):
        return
    if entry and isinstance(entry[0], list):
        for part in entry:
            yield from _shapes(part)
    elif all(type(size) is int and size >= 0 for size in entry):
        yield entry


COMPOSED = "composed "
"""The run leaves an event around the parts, `composed reduce_scatter of 2 scatters` (`composed` in
`ddp_lab.strategy.communication.collectives`)."""
COMPOSED_NAME = re.compile(
    COMPOSED + r"(?P<kind>all_gather|reduce_scatter) of (?P<parts>(?P<count>\d{1,6}) (?:scatter|broadcast)s?)"
)
ROOT = re.compile(r"(?:, root \d+| root \d+).*")
"""What the group of one root has behind the name of the group of which it was made."""


def composed_of(name: str, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
            "dtype": next((part["dtype"] for part in parts if part["dtype"]), ""),
        }
    ]
