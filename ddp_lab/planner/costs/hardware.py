"""Devices and links by name, from the table in `ddp_lab/planner/hardware.toml`, and clusters made of them.

device("L4")    device("rtx4090")    device("cpu")    device("card.toml")
link("pcie4")   link("8xndr")        link("1gbit")
cluster("2xL4", "pcie4")             cluster("4x8xH100", between="8xndr")
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ddp_lab.machine import physical_memory
from ddp_lab.planner.contracts import ACCESSES, CONTIGUOUS
from ddp_lab.planner.costs.cluster import Attention, Cluster, Device, Host, Link
from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.speed import SimulatedLink
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.untrusted import fitted, settings_in

TABLE = Path(__file__).parent.parent / "hardware.toml"
OWN = ".toml"
"""How the name of a device ends that is a file with an entry in the form of the table."""
ADD = (
    "Or measure it where it is (ddp-lab plan measure --output card.toml) or write its file: [devices.NAME] with "
    'like = "H100" and what differs (memory_mib, flops, bytes_per_s, efficiency, source); plan with --gpus 2xcard.toml'
)
Dtype = Literal["float32", "tfloat32", "bfloat16", "float16", "float64"]
Amount = Annotated[float, msgspec.Meta(gt=0, le=1e30)]


class Parts(msgspec.Struct, forbid_unknown_fields=True):
    compute: Amount | dict[Dtype, Amount]
    launch_us: Amount


class Form(msgspec.Struct, forbid_unknown_fields=True):
    forward: Amount
    backward: Amount
    half: Annotated[float, msgspec.Meta(ge=0)]
    narrower: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class OfLink(msgspec.Struct, forbid_unknown_fields=True):
    bytes_per_s: Amount
    latency_us: Amount
    efficiency: Amount
    source: str


class DeviceEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A device in a file of its own, with what it is `like` filled in."""

    kind: Literal["cuda", "cpu"]
    memory_mib: Amount
    flops: Annotated[dict[Dtype, Amount], msgspec.Meta(min_length=1)]
    bytes_per_s: Amount
    efficiency: Parts
    source: str
    elements_per_s: Amount = float("inf")
    attention: Form | None = None
    operators: dict[Literal[*ACCESSES, "host_us", "source"], Amount | str] = {}  # type: ignore[valid-type]
    link: str | OfLink | None = None
    title: str = ""
    aliases: list[str] = []
    like: str = ""


def entry_of(name: str) -> tuple[str, dict[str, Any]]:
    """Name and entry of a device, of the table or of a file. What it is `like` is filled in."""
    if not name.endswith(OWN):
        try:
            key = canonical_name(name, table()["devices"], "device")
        except UserError as error:
            raise UserError(f"{error} {ADD}") from None
        return key, filled(table()["devices"][key])
    content = settings_in(Path(name), "--gpus")
    devices = content.get("devices")
    if len(content) != 1 or not isinstance(devices, dict) or len(devices) != 1:
        raise UserError(f"--gpus {name}: must have one table [devices.NAME] alone, as in ddp_lab/planner/hardware.toml")
    ((key, fields),) = devices.items()
    entry = filled(fitted(fields, dict[str, Any], name, "entry of a device"))
    fitted(entry, DeviceEntry, name, "entry of a device")
    compute = entry["efficiency"]["compute"]
    if isinstance(compute, dict) and (missing := [dtype for dtype in entry["flops"] if dtype not in compute]):
        raise UserError(f"{name}: a damaged entry of a device: efficiency.compute: missing {missing[0]}")
    return key, entry


def filled(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry, with what it does not say as in the one that it is `like`."""
    like = canonical_name(str(entry["like"]), table()["devices"], "device") if "like" in entry else None
    return {**(table()["devices"][like] if like else {}), **entry}


def canonical_name(name: str, entries: Mapping[str, Any], noun: str, more_names: Iterable[str] = ()) -> str:
    """The key in `entries` that `name` stands for."""
    spellings = {spelled(alias): key for key, entry in entries.items() for alias in (key, *entry.get("aliases", ()))}
    if spelled(name) not in spellings:
        raise UserError(unknown_name(noun, name, [*entries, *more_names]))
    return spellings[spelled(name)]


def spelled(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text())


# By name --------------------------------------------------------------------------------------------------------------

CPU = "cpu"


def device(name: str, efficiency: float | None = None) -> Device:
    """The device of this name, or of this file; case, blanks and hyphens of a name do not matter. `cpu` has all of this
    machine's memory. `efficiency`: part of the peak rates of compute and of memory that operators reach, above 0, at
    most 1. Default: the table's."""
    key, entry = entry_of(name)
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
    """The link of this name, or of a rate in `tc`'s words; `8xndr` is eight of them side by side."""
    count, _, single = name.partition("x") if re.match(r"[0-9]{1,9}x", name) else ("1", "", name)
    if int(count) < 1:
        raise UserError(f"link '{name}': the number of links must be at least 1")
    if re.fullmatch(r"[0-9.]+\s*[kmgt]?bit", single, re.IGNORECASE) and (speed := SimulatedLink.parse(single)):
        entry = table()["ethernet"]
        key, bytes_per_s = str(speed), speed.bits_per_s / 8
    else:
        key = canonical_name(single, table()["links"], "link", ["1gbit"])
        entry = table()["links"][key]
        bytes_per_s = entry["bytes_per_s"]
    return link_of(key, entry, bytes_per_s, int(count))


def link_of(key: str, entry: Mapping[str, Any], bytes_per_s: float, count: int = 1) -> Link:
    part = entry["efficiency"]
    full_name = key if count == 1 else f"{count}x{key}"
    source = f"{entry['source']}; {part:.0%} of {bytes_per_s * count / 1e9:g} GB/s"
    rate, peers, slower = count * bytes_per_s * part, entry.get("peers", 1), entry.get("slower_per_doubling", 0.0)
    return Link(full_name, entry["latency_us"] * 1e-6, rate, source, peers, count, slower)


def host(ranks: int) -> Host:
    """The memory of a node with so many ranks."""
    entry = table()["host"]
    return Host(entry["bytes_per_s"] / ranks, entry["copy_bytes_per_s"], entry["source"])


def outside_bytes(cluster: Cluster, mesh: Mesh | None) -> float:
    """What a rank holds outside torch's allocator: CUDA's context, and NCCL's buffers of the world's group and of each
    dimension of its mesh."""
    if cluster.device.kind == "cpu":
        return 0.0
    entry, ranks = table()["outside"], cluster.world_size
    spans = [ranks] if ranks > 1 else []  # from a group's first rank to its last
    if mesh:
        degrees = list(mesh.degrees.values())[::-1]  # the innermost dimension first
        spans += [span for degree, span in zip(degrees, accumulate(degrees, mul), strict=True) if 1 < degree < ranks]
    share = cluster.inside.bytes_per_s / entry["group_bytes_per_s"]
    over_network = sum(span > cluster.ranks_per_node for span in spans) * min(share, 1.0) * entry["network_mib"]
    return 2**20 * (entry["context_mib"] + len(spans) * share * entry["group_mib"] + over_network)


def cluster(
    gpus: str, link_name: str | None = None, between: str | None = None, efficiency: float | None = None
) -> Cluster:
    """The cluster that a command line names. `gpus`: `2xL4`: so many devices in one node; `4x8xH100`: nodes, and
    devices in each; `2xcard.toml`: of a file. `link_name`: between the devices of a node. Default: the device's own, if
    it has one. `between`: between nodes: what all devices of a node share. `efficiency`: as for `device`."""
    parts = re.fullmatch(r"(?:([0-9]{1,9})x)?(?:([0-9]{1,9})x)?(.+)", gpus.strip())
    numbers = [int(part) for part in parts.groups()[:2] if part] if parts else []
    if parts is None or 0 in numbers:
        raise UserError(f"devices '{gpus}': give how many and which, such as 2xL4, or 4x8xH100 for 4 nodes of 8")
    nodes, ranks = ([1, 1] + numbers)[-2:]
    if nodes == 1 and between is not None:
        raise UserError(f"a link between nodes ('{between}'), but '{gpus}' is one node; 2x4xL4 would be two nodes of 4")
    single = device(parts[3], efficiency)
    if single.kind == "cpu":
        single = replace(single, memory_bytes=single.memory_bytes // ranks)
    inside = link_name or entry_of(parts[3])[1].get("link")
    if inside is None:
        raise UserError(f"--link is missing: {single.name} has none of its own; give pcie4, 10gbit, ...")
    return Cluster(
        device=single,
        nodes=nodes,
        ranks_per_node=ranks,
        inside=link(inside) if isinstance(inside, str) else link_of("its own", inside, inside["bytes_per_s"]),
        between=link(between) if between is not None else None,
        backend="gloo" if single.kind == "cpu" else "nccl",
    )
