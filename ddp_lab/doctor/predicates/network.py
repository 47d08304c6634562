"""Which network each rank uses, and how it fails."""

import re

from ddp_lab.doctor.facts import Facts, Match
from ddp_lab.doctor.reading.nccl_log import Process, by_value
from ddp_lab.doctor.reading.texts import printable

VIRTUAL_INTERFACE = re.compile(r"(?:lo|docker|br-|veth|virbr|cni|flannel|cali|podman)[\w.-]{0,20}")
LOCAL_ADDRESS = re.compile(r"172\.17\.0\.|127\.|169\.254\.")
_CARD = re.compile(r"\[(\d{1,3})\]([\w.-]{1,32}):([0-9a-fA-F.:%\w]{2,64})<")
_LOCAL_TARGET = re.compile(r"[Cc]onnect to (?:127\.|172\.17\.0\.|169\.254\.)|remote=\[(?:127|169\.254)\.[\d.]{3,11}\]")
_NOT_CONNECTED = re.compile(
    r"[Cc]onnect to \S{1,80} (?:failed|returned)|connectFullMesh failed|Call to connect (?:failed|timeout)"
)
_COMPLETION_12 = re.compile(
    r"Got completion .{0,200}(?:error:? |status=(?:\w{1,40}\()?)12\b|transport retry counter exceeded"
    r"|(?<!RNR_)RETRY_EXC_ERR"
)
_INFINIBAND_HERE = re.compile(r"%ib\d|:\d/IB\b|localGids? ?:? ?fe80:|link_layer: {0,4}InfiniBand")
_ROCE_HERE = re.compile(r"::ffff:|:\d/RoCE\b|link_layer: {0,4}Ethernet|/roce\b|\brocep?\d", re.IGNORECASE)
_RDMA_HERE = re.compile(r"hca_id:|CA '\w{1,40}'|\bmlx[45]_\d")
_CLOSED = re.compile(r"Connection closed by (?:remote )?peer \[?([\w.-]{1,200}?)\]?(?:<\d{1,5}>|:\d{1,5}\b)")
_NO_EFA = re.compile(r"NET/OFI .{0,40}fi_getinfo\(\) call failed: No data available")
_OFI_IN_USE = re.compile(
    r"NET/OFI (?:Using transport protocol|Selected [Pp]rovider is (?!tcp))|Using network (?:AWS|OFI|Libfabric)"
)


def mixed_fabrics(facts: Facts) -> Match | None:
    by_fabric = by_value(facts.of_one_job, "fabric")
    if len(by_fabric) < 2:
        return None
    sentences = [f"{process.name} on {process.host} uses {fabric}." for fabric, (process, *_) in by_fabric.items()]
    lines = [process.lines.get("cards") or process.lines["network"] for process, *_ in by_fabric.values()]
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
    """Ranks of several hosts, or ranks that cannot connect, use an interface that no other host can reach.

    Data on such an interface beside a bootstrap on another is enough, unless the log has all ranks on one host.
    """
    refused, failed = facts.search(_LOCAL_TARGET), facts.search(_NOT_CONNECTED)
    is_stuck = bool(failed and not facts.is_one_host) or bool(facts.hangs and facts.is_multi_node)
    if facts.is_multi_node or refused:
        bad = [process for process in facts.processes if process.interface and _is_local(process)]
        if bad or refused:
            details = [f"{process.name} listens on {process.interface} ({process.address})." for process in bad[:4]]
            return Match([process.lines["interface"] for process in bad] + refused, details)
    sending = {
        process: names
        for process in facts.processes
        if process.network in (None, "Socket")
        and (names := _local_cards(process, after_first=is_stuck))
        and (is_stuck or (process.interface and not _is_local(process) and not facts.is_one_host))
    }
    if not sending:
        return None
    details = [
        f"{p.name} sends over {', '.join(names)} (bootstrap: {p.interface})." for p, names in [*sending.items()][:4]
    ]
    return Match([line for p in sending for name in ("interface", "cards") if (line := p.lines.get(name))], details)


def _is_local(process: Process) -> bool:
    return bool(
        VIRTUAL_INTERFACE.fullmatch(process.interface or "") or LOCAL_ADDRESS.match((process.address or "").strip("[]"))
    )


def _local_cards(process: Process, after_first: bool) -> list[str]:
    """Interfaces over which NCCL's TCP transport sends that are local to a host: the first, or one after it too."""
    return [
        f"{name} ({address})"
        for number, name, address in _CARD.findall(process.cards or "")
        if (number == "0" or after_first)
        and (VIRTUAL_INTERFACE.fullmatch(name) or LOCAL_ADDRESS.match(address) or address.startswith("fe80"))
    ]


def interface_not_here(facts: Facts) -> Match | None:
    """A variable of this machine names an interface that it does not have."""
    if not facts.machine:
        return None
    details = []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = facts.machine.environment.get(name, "")
        names = [part.split(":")[0] for part in value.removeprefix("=").split(",") if part]
        interfaces = facts.machine.interfaces
        if value and not value.startswith("^") and not any(i.startswith(w) for w in names for i in interfaces):
            details.append(f"{name}={value}, but this machine has {', '.join(interfaces)}.")
    return Match([], details) if details else None


def roce_gid(facts: Facts) -> Match | None:
    """Unacknowledged packets over RoCE (an IPv4-mapped GID, or a card that says so)."""
    return _unanswered(facts, "RoCE")


def infiniband_retry(facts: Facts) -> Match | None:
    return _unanswered(facts, "InfiniBand")


def retry_exceeded_unknown(facts: Facts) -> Match | None:
    """Unacknowledged packets on a fabric that the log does not name."""
    return _unanswered(facts, "unknown")


def _unanswered(facts: Facts, fabric: str) -> Match | None:
    lines = facts.search(_COMPLETION_12)
    if not lines:
        return None
    roce, infiniband = facts.search(_ROCE_HERE), facts.search(_INFINIBAND_HERE)
    fabric_here = "RoCE" if roce and not infiniband else "InfiniBand" if infiniband and not roce else "unknown"
    return (
        Match([*lines, *(roce or infiniband)[:1]] if fabric_here != "unknown" else lines)
        if fabric_here == fabric
        else None
    )


def closed_by_one_host(facts: Facts) -> Match | None:
    """All closed connections go to one host without a log. So that host is not a victim like the others."""
    closed = [(line, match[1]) for line in facts.search(_CLOSED) if (match := _CLOSED.search(line.text))]
    hosts = {host for _, host in closed}
    logged_hosts = {process.host for process in facts.processes} | {""}
    if len(hosts) != 1 or logged_hosts & {host.split(".")[0] for host in hosts}:
        return None
    return Match(
        [line for line, _ in closed],
        [f"All connections that closed were to {printable(hosts.pop())}: look there first."],
    )


def efa_not_found(facts: Facts) -> Match | None:
    """The plugin finds no card, and no rank uses it afterwards."""
    lines = facts.search(_NO_EFA)
    return Match(lines) if lines and not facts.search(_OFI_IN_USE) else None
