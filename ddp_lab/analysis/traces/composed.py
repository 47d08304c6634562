"""Collectives that are made of others: over Gloo, of a scatter or a broadcast from each rank.

The run leaves an event around them, `composed reduce_scatter of 2 scatters` (`composed` in
`ddp_lab.strategy.communication.collectives`).
"""

import re
from typing import Any

PREFIX = "composed "
NAME = re.compile(
    PREFIX + r"(?P<kind>all_gather|reduce_scatter) of (?P<parts>(?P<count>\d{1,6}) (?:scatter|broadcast)s?)"
)
ROOT = re.compile(r"(?:, root \d+| root \d+).*")
"""What the group of one root has behind the name of the group of which it was made."""


def one_of(name: str, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The collective in the place of its `parts`, rows in order of issue; none if one of these is missing.

    It runs from the start of the first to the end of the last, and its payload is the whole tensor: the sum of what is
    broadcast, and what each root scatters.
    """
    match = NAME.fullmatch(name)
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
