"""Which network each rank uses, and what it says when that fails."""

import re

from doctor.facts import Facts, Match
from doctor.reading.nccl_log import Process

VIRTUAL_INTERFACE = re.compile(r"(?:lo|docker|br-|veth|virbr|cni|flannel|cali|podman)[\w.-]{0,20}")
LOCAL_ADDRESS = re.compile(r"172\.17\.|127\.")
_LOCAL_TARGET = re.compile(r"connect to (?:127\.|172\.17\.)")
_COMPLETION_12 = re.compile(r"Got completion .{0,200}(?:error |status=(?:\w{1,40}\()?)12\b")
_RDMA_HERE = re.compile(r"hca_id:|CA '\w{1,40}'|Failed to open libibverbs|\bmlx[45]_\d")


def mixed_fabrics(facts: Facts) -> Match | None:
    by_fabric = {process.fabric: process for process in facts.processes if process.fabric}
    if len(by_fabric) < 2:
        return None
    sentences = [f"{process.name} on {process.host} uses {fabric}." for fabric, process in by_fabric.items()]
    lines = [process.lines.get("cards") or process.lines["network"] for process in by_fabric.values()]
    return Match(lines, sentences)


def socket_despite_infiniband(facts: Facts) -> Match | None:
    """Every rank uses TCP between nodes, though there are RDMA cards."""
    processes = [process for process in facts.processes if process.network == "Socket"]
    if not processes or len(processes) < len(facts.processes) or not facts.is_multi_node:
        return None
    lines = [processes[0].lines["network"]]
    cards = [nic for topology in facts.topologies for nic in topology.nics]
    disabled = [process for process in processes if process.environment.get("NCCL_IB_DISABLE") == "1"]
    signs = [line for line in facts.search(_RDMA_HERE) if not line.text.strip().startswith("NIC")]
    if disabled:
        return Match([*lines, disabled[0].lines["NCCL_IB_DISABLE"]], ["NCCL_IB_DISABLE=1 forbids RDMA."])
    if cards:
        return Match(lines, [f"The topology names RDMA cards: {', '.join(cards[:8])}."])
    return Match([*lines, *signs]) if signs else None


def virtual_interface(facts: Facts) -> Match | None:
    """Ranks of several hosts, or ranks that cannot connect, listen on an interface that no other host can reach."""
    bad = [process for process in facts.processes if process.interface and _is_local(process)]
    refused = facts.search(_LOCAL_TARGET)
    if not bad or not (facts.is_multi_node or refused):
        return None
    details = [f"{process.name} listens on {process.interface} ({process.address})." for process in bad[:4]]
    return Match([process.lines["interface"] for process in bad] + refused, details)


def _is_local(process: Process) -> bool:
    return bool(
        VIRTUAL_INTERFACE.fullmatch(process.interface or "") or LOCAL_ADDRESS.match((process.address or "").strip("[]"))
    )


def interface_not_here(facts: Facts) -> Match | None:
    """A variable of this machine names an interface that it does not have."""
    if not facts.machine:
        return None
    details = []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = facts.machine.environment.get(name, "")
        wanted = [part.split(":")[0] for part in value.removeprefix("=").split(",") if part]
        known = facts.machine.interfaces
        if value and not value.startswith("^") and not any(i.startswith(w) for w in wanted for i in known):
            details.append(f"{name}={value}, but this machine has {', '.join(known)}.")
    return Match([], details) if details else None


def roce_gid(facts: Facts) -> Match | None:
    """Unacknowledged packets over RoCE (an IPv4-mapped GID, or a card that says so)."""
    lines = facts.search(_COMPLETION_12)
    cards = [process.lines["cards"] for process in facts.processes if process.fabric == "RoCE"]
    if lines and (cards or any("::ffff:" in line.text for line in lines)):
        return Match([*lines, *cards[:1]])
    return None


def infiniband_retry(facts: Facts) -> Match | None:
    lines = facts.search(_COMPLETION_12)
    return Match(lines) if lines and not roce_gid(facts) else None
