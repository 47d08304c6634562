"""The mesh of a run (docs/run-record.md): the places of its ranks, and the dimension of each process group."""

from collections.abc import Sequence
from math import prod
from typing import Any

DATA_DIMENSIONS = ("dp", "replicate", "shard", "ep")
"""Ranks that differ along one of these see different samples."""
EVERYONE = "mesh"

Mesh = dict[str, int]
"""The number of ranks along each dimension, from the outermost to the innermost."""


def mesh_of(record: dict[str, Any] | None) -> Mesh | None:
    """The mesh of a run; None if it has none, or there is no record."""
    text = record["config"].get("mesh") if record else None
    parts = [part.partition("=") for part in text.split(",")] if text else []
    return {name: int(number) for name, _, number in parts} or None


def coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """The place of a rank along each dimension."""
    place = {}
    for name, degree in reversed(mesh.items()):
        rank, place[name] = divmod(rank, degree)
    return {name: place[name] for name in mesh}


def dimension_of(mesh: Mesh, ranks: Sequence[int]) -> str:
    """The dimension of a process group: the only one in which its ranks differ.

    Ranks that differ in several of `DATA_DIMENSIONS` and `cp` are of `dp`, or of `shard` if they hold one copy of the
    model among several. If they differ in other dimensions too, a group of all ranks is `EVERYONE`, and the dimension
    of a smaller group is empty. A group of one rank is of `dp` if all ranks see the same samples, or if the mesh has
    `ep`: the rank holds an expert alone. Otherwise it is of the first dimension of size 1, and empty without one.
    """
    if not ranks:
        return ""
    places = [coordinates(mesh, rank) for rank in ranks]
    differ = [name for name in mesh if len({place[name] for place in places}) > 1]
    if not differ:
        same_samples = all(mesh.get(name, 1) == 1 for name in DATA_DIMENSIONS)
        return (
            "dp" if same_samples or "ep" in mesh else next((name for name, degree in mesh.items() if degree == 1), "")
        )
    if len(differ) == 1:
        return differ[0]
    if set(differ) <= {*DATA_DIMENSIONS, "cp"}:
        return "shard" if mesh.get("replicate", 1) > 1 and "replicate" not in differ else "dp"
    return EVERYONE if len(set(ranks)) == prod(mesh.values()) else ""


def in_order(mesh: Mesh, dimensions: Sequence[str]) -> list[str]:
    """The names of `dimensions`, each once: those of the mesh, then the others."""
    order = [*mesh, "dp", EVERYONE, ""]
    return sorted(set(dimensions), key=lambda name: order.index(name) if name in order else len(order))
