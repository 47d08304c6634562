"""Devices and links by name, from the table in `ddp_lab/planner/hardware.toml`, and clusters made of them.

device("L4")    device("rtx4090")    device("cpu")
link("pcie4")   link("8xndr")        link("1gbit")
cluster("2xL4", "pcie4")             cluster("4x8xH100", between="8xndr")
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ddp_lab.planner.costs.access import CONTIGUOUS, KINDS
from ddp_lab.planner.costs.cluster import Attention, Cluster, Device, Host, Link
from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.speed import Link as Speed
from ddp_lab.runtime.link.speed import rate_of

TABLE = Path(__file__).parent.parent / "hardware.toml"
CPU = "cpu"
ADD = (
    'Or add it to ddp_lab/planner/hardware.toml: [devices.NAME] with like = "H100" and what differs: memory_mib, '
    "flops, bytes_per_s, efficiency, source"
)


def device(name: str, efficiency: float | None = None) -> Device:
    """The device of this name; case, blanks and hyphens do not matter. `cpu` has all of this machine's memory.

    Args:
        efficiency: Part of the peak rates of compute and of memory that operators reach, above 0, at most 1. Default:
            the table's.

    Raises:
        UserError: there is none; names similar ones. Or the efficiency is outside its bounds.
    """
    try:
        key = known(name, table()["devices"], "device")
    except UserError as error:
        raise UserError(f"{error} {ADD}") from None
    entry = entry_of(key)
    parts, kind = entry["efficiency"], table()["operators"][entry["kind"]]
    if efficiency is not None and not 0 < efficiency <= 1:
        raise UserError(f"--efficiency {efficiency:g}: give a part above 0 and at most 1")
    compute = efficiency or parts["compute"]
    accesses = {access: efficiency or kind[access] for access in KINDS}
    attention = Attention(**entry["attention"]) if "attention" in entry else None
    return Device(
        key,
        entry["kind"],
        entry["memory_mib"] * 2**20 if key != CPU else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        {dtype: compute * rate for dtype, rate in entry["flops"].items()},
        {access: part * entry["bytes_per_s"] for access, part in accesses.items()},
        parts["launch_us"] * 1e-6,
        f"{entry['source']}; {compute:.0%} of peak compute and {accesses[CONTIGUOUS]:.0%} of peak memory rate",
        entry.get("elements_per_s", float("inf")),
        Attention(efficiency, efficiency, 0.0) if efficiency and attention else attention,
        entry["flops"],
        kind["host_us"] * 1e-6,
    )


def entry_of(key: str) -> dict[str, Any]:
    """What the table has of a device, and else what it has of the one that it is `like`."""
    entry = table()["devices"][key]
    return {**table()["devices"].get(entry.get("like"), {}), **entry}


def link(name: str) -> Link:
    """The link of this name, or of a rate in `tc`'s words; `8xndr` is eight of them side by side.

    Raises:
        UserError: there is none; names similar ones.
    """
    count, _, single = name.partition("x") if re.match(r"\d+x", name) else ("1", "", name)
    if int(count) < 1:
        raise UserError(f"link '{name}': the number of links must be at least 1")
    if re.match(r"[\d.]+\s*[kmgt]?bit", single, re.IGNORECASE):
        entry = table()["ethernet"]
        bits = rate_of(single.lower())
        key, bytes_per_s = str(Speed(bits)), bits / 8
    else:
        key = known(single, table()["links"], "link", ["1gbit"])
        entry = table()["links"][key]
        bytes_per_s = entry["bytes_per_s"]
    part = entry["efficiency"]
    full_name = key if count == "1" else f"{count}x{key}"
    source = f"{entry['source']}; {part:.0%} of {bytes_per_s * int(count) / 1e9:g} GB/s"
    rate, peers = int(count) * bytes_per_s * part, entry.get("peers", 1)
    return Link(full_name, entry["latency_us"] * 1e-6, rate, source, peers, int(count))


def host(ranks: int) -> Host:
    """The memory of a node with so many ranks."""
    entry = table()["host"]
    return Host(entry["bytes_per_s"] / ranks, entry["copy_bytes_per_s"], entry["source"])


def cluster(
    gpus: str, link_name: str | None = None, between: str | None = None, efficiency: float | None = None
) -> Cluster:
    """The cluster that a command line names.

    Args:
        gpus: `2xL4`: so many devices in one node; `4x8xH100`: nodes, and devices in each.
        link_name: Between the devices of a node. Default: the device's own, if it has one.
        between: Between nodes: what all devices of a node share.
        efficiency: As for `device`.

    Raises:
        UserError: a name or number that makes no sense.
    """
    parts = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?(.+)", gpus.strip())
    numbers = [int(part) for part in parts.groups()[:2] if part] if parts else []
    if parts is None or 0 in numbers:
        raise UserError(f"devices '{gpus}': give how many and which, such as 2xL4, or 4x8xH100 for 4 nodes of 8")
    nodes, ranks = ([1, 1] + numbers)[-2:]
    if nodes == 1 and between is not None:
        raise UserError(f"a link between nodes ('{between}'), but '{gpus}' is one node; 2x4xL4 would be two nodes of 4")
    of_one = device(parts[3], efficiency)
    if of_one.kind == "cpu":
        of_one = replace(of_one, memory_bytes=of_one.memory_bytes // ranks)
    link_name = link_name or entry_of(of_one.name).get("link")
    if link_name is None:
        raise UserError(f"--link is missing: {of_one.name} has none of its own; give pcie4, 10gbit, ...")
    return Cluster(
        device=of_one,
        nodes=nodes,
        ranks_per_node=ranks,
        inside=link(link_name),
        between=link(between) if between is not None else None,
        backend="gloo" if of_one.kind == "cpu" else "nccl",
    )


def known(name: str, entries: Mapping[str, Any], what: str, others: Iterable[str] = ()) -> str:
    """The key in `entries` that `name` stands for.

    Raises:
        UserError: none.
    """
    spellings = {spelled(alias): key for key, entry in entries.items() for alias in (key, *entry.get("aliases", ()))}
    if spelled(name) not in spellings:
        raise UserError(unknown_name(what, name, [*entries, *others]))
    return spellings[spelled(name)]


def spelled(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text())
