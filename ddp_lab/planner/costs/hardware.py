"""Devices and links by name, from the table in `ddp_lab/planner/hardware.toml`, and clusters made of them.

device("L4")    device("rtx4090")    device("cpu")    device("card.toml")
link("pcie4")   link("8xndr")        link("1gbit")
cluster("2xL4", "pcie4")             cluster("4x8xH100", between="8xndr")
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddp_lab.machine import physical_memory
from ddp_lab.planner.contracts import ACCESSES, CONTIGUOUS
from ddp_lab.planner.costs.cluster import Attention, Cluster, Device, Host, Link
from ddp_lab.planner.costs.entries import found, known, table
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.speed import Link as Speed

CPU = "cpu"


def device(name: str, efficiency: float | None = None) -> Device:
    """The device of this name, or of this file; case, blanks and hyphens of a name do not matter. `cpu` has all of this
    machine's memory.

    Args:
        efficiency: Part of the peak rates of compute and of memory that operators reach, above 0, at most 1. Default:
            the table's.

    Raises:
        UserError: there is none; names similar ones. Or the efficiency is outside its bounds.
    """
    key, entry = found(name)
    of_kind = table()["operators"][entry["kind"]]
    kind, parts = {**of_kind, **entry.get("operators", {})}, entry["efficiency"]
    if efficiency is not None and not 0 < efficiency <= 1:
        raise UserError(f"--efficiency {efficiency:g}: give a part above 0 and at most 1")
    compute, flops = efficiency or parts["compute"], entry["flops"]
    compute = compute if isinstance(compute, dict) else dict.fromkeys(flops, compute)
    accesses = {access: efficiency or kind[access] for access in ACCESSES}
    attention = Attention(**entry["attention"]) if "attention" in entry else None
    reached = f"{compute[max(flops, key=flops.get)]:.0%} of peak compute and {accesses[CONTIGUOUS]:.0%} of"
    memory = entry["memory_mib"] * 2**20 if "memory_mib" in entry else physical_memory()
    return Device(
        key,
        entry["kind"],
        int(memory),
        {dtype: compute[dtype] * rate for dtype, rate in flops.items()},
        {access: part * entry["bytes_per_s"] for access, part in accesses.items()},
        parts["launch_us"] * 1e-6,
        f"{entry['source']}; {reached} peak memory rate",
        entry.get("elements_per_s", float("inf")),
        Attention(efficiency, efficiency, 0.0) if efficiency and attention else attention,
        flops,
        kind["host_us"] * 1e-6,
        kind["source"],
    )


def link(name: str) -> Link:
    """The link of this name, or of a rate in `tc`'s words; `8xndr` is eight of them side by side.

    Raises:
        UserError: there is none; names similar ones.
    """
    count, _, single = name.partition("x") if re.match(r"[0-9]{1,9}x", name) else ("1", "", name)
    if int(count) < 1:
        raise UserError(f"link '{name}': the number of links must be at least 1")
    if re.fullmatch(r"[0-9.]+\s*[kmgt]?bit", single, re.IGNORECASE) and (speed := Speed.parse(single)):
        entry = table()["ethernet"]
        key, bytes_per_s = str(speed), speed.bits_per_s / 8
    else:
        key = known(single, table()["links"], "link", ["1gbit"])
        entry = table()["links"][key]
        bytes_per_s = entry["bytes_per_s"]
    return link_of(key, entry, bytes_per_s, int(count))


def link_of(key: str, entry: Mapping[str, Any], bytes_per_s: float, count: int = 1) -> Link:
    part = entry["efficiency"]
    full_name = key if count == 1 else f"{count}x{key}"
    source = f"{entry['source']}; {part:.0%} of {bytes_per_s * count / 1e9:g} GB/s"
    rate, peers = count * bytes_per_s * part, entry.get("peers", 1)
    return Link(full_name, entry["latency_us"] * 1e-6, rate, source, peers, count)


def host(ranks: int) -> Host:
    """The memory of a node with so many ranks."""
    entry = table()["host"]
    return Host(entry["bytes_per_s"] / ranks, entry["copy_bytes_per_s"], entry["source"])


def cluster(
    gpus: str, link_name: str | None = None, between: str | None = None, efficiency: float | None = None
) -> Cluster:
    """The cluster that a command line names.

    Args:
        gpus: `2xL4`: so many devices in one node; `4x8xH100`: nodes, and devices in each; `2xcard.toml`: of a file.
        link_name: Between the devices of a node. Default: the device's own, if it has one.
        between: Between nodes: what all devices of a node share.
        efficiency: As for `device`.

    Raises:
        UserError: a name or number that makes no sense.
    """
    parts = re.fullmatch(r"(?:([0-9]{1,9})x)?(?:([0-9]{1,9})x)?(.+)", gpus.strip())
    numbers = [int(part) for part in parts.groups()[:2] if part] if parts else []
    if parts is None or 0 in numbers:
        raise UserError(f"devices '{gpus}': give how many and which, such as 2xL4, or 4x8xH100 for 4 nodes of 8")
    nodes, ranks = ([1, 1] + numbers)[-2:]
    if nodes == 1 and between is not None:
        raise UserError(f"a link between nodes ('{between}'), but '{gpus}' is one node; 2x4xL4 would be two nodes of 4")
    of_one = device(parts[3], efficiency)
    if of_one.kind == "cpu":
        of_one = replace(of_one, memory_bytes=of_one.memory_bytes // ranks)
    own = link_name or found(parts[3])[1].get("link")
    if own is None:
        raise UserError(f"--link is missing: {of_one.name} has none of its own; give pcie4, 10gbit, ...")
    return Cluster(
        device=of_one,
        nodes=nodes,
        ranks_per_node=ranks,
        inside=link(own) if isinstance(own, str) else link_of("its own", own, own["bytes_per_s"]),
        between=link(between) if between is not None else None,
        backend="gloo" if of_one.kind == "cpu" else "nccl",
    )
