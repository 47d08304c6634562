"""NCCL's log (NCCL_DEBUG=INFO) of any version, as facts about each process that wrote it.

A line begins with `host:pid:tid [device]`; after it stand the source file, `NCCL` (from 2.3 on), and INFO or WARN. The
formats are from src/debug.cc, src/init.cc and src/transport/ of https://github.com/NVIDIA/nccl.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ddp_lab.collectives.ranks import ranks_in_words
from ddp_lab.doctor.reading.texts import Line, Text

RDMA = "InfiniBand or RoCE"
_PREFIX = re.compile(r":(\d{1,10}):\d{1,10} \[(\d{1,3})\] ")
_NO_HOST = re.compile(r"[^\w.-]")
_SEVERITY = re.compile(r"\b(?:NCCL )?(INFO|WARN) (.*)")
_RANK = re.compile(r"comm \S{1,40} rank (\d{1,6}) n[rR]anks (\d{1,6})")
_VERSION = re.compile(r"NCCL version (\d{1,2}\.\d{1,3}(?:\.\d{1,3})?)")
_BARE_VERSION = re.compile(r"(?:^|[\]>):] ?)NCCL version \d")
_NETWORK = re.compile(r"Using (?:internal )?[nN]etwork (\S{1,40})")
_NET = re.compile(r"NET/(IB|Socket|OFI|\S{1,20}?) ?: Using (.*)")
_BOOTSTRAP = re.compile(
    r"Bootstrap ?: Using (?:\[\d+\])?([\w.-]{1,32}):([0-9a-fA-F.:\[\]]{2,64}(?:%[\w.-]{1,32}\]?)?)<\d{1,5}>"
)
_OLD_BOOTSTRAP = re.compile(r"NET : Using interface ([\w.-]{1,32}):([0-9a-fA-F.:]{2,64})<\d{1,5}>")
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d{1,3}(?:/\d{1,3})? : (\d{1,6})(?:\[(\w{1,16})\])? -> (\d{1,6})(?:\[(\w{1,16})\])?"
    r"(?: \[(send|receive)\])? via (\S.{0,60})"
)
_GDR = re.compile(r"GPU Direct RDMA (Enabled|Disabled) for (?:HCA|GPU)")
_ENVIRONMENT = re.compile(r"(NCCL_[A-Z0-9_]{1,60}) set (?:by environment )?to (\S{1,100})")


@dataclass(eq=False)
class Process:
    """A process that wrote into a log. A process with several GPUs counts once for each."""

    host: str
    pid: int
    device: int
    rank: int | None = None
    world_size: int | None = None
    version: str | None = None
    network: str | None = None
    cards: str | None = None
    interface: str | None = None
    address: str | None = None
    gdr: bool | None = None
    environment: dict[str, str] = field(default_factory=dict)
    transports: dict[tuple[int, int], Counter[str]] = field(default_factory=dict)
    devices: dict[int, str] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)
    warnings: list[Line] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else f"{self.host}:{self.pid}"

    @property
    def fabric(self) -> str | None:
        """`Socket`, `InfiniBand`, `RoCE`, `RDMA` if it is unknown which of these two, or a plugin's name."""
        if self.network and self.network.startswith("IB") and self.cards:
            return "RoCE" if "/RoCE" in self.cards else "InfiniBand"
        return RDMA if self.network and self.network.startswith("IB") else self.network

    def used(self, prefix: str) -> bool:
        """Whether a channel goes over a transport that begins with `prefix`."""
        return any(name.startswith(prefix) for transports in self.transports.values() for name in transports)


def read_processes(texts: Iterable[Text]) -> list[Process]:
    """The processes of all logs, ordered by rank if it is known."""
    processes: dict[tuple[str, int, int], Process] = {}
    for text in texts:
        current: Process | None = None
        unclaimed: Line | None = None
        for line in text.lines:
            match = _PREFIX.search(line.text)
            severity = _SEVERITY.search(line.text, match.end()) if match else None
            if match and severity:
                key = (_NO_HOST.split(line.text[: match.start()])[-1], int(match[1]), int(match[2]))
                current = processes.setdefault(key, Process(*key))
                _take(current, line, severity[1], severity[2])
            elif _BARE_VERSION.search(line.text):  # has no prefix: of the process whose lines are around it
                unclaimed = line
            if unclaimed and current:
                _take(current, unclaimed, "INFO", unclaimed.text)
                unclaimed = None
    siblings: dict[tuple[str, int], list[Process]] = {}
    for process in processes.values():
        siblings.setdefault((process.host, process.pid), []).append(process)
    for of_one in siblings.values():
        _fill_from_siblings(of_one)
    return sorted(processes.values(), key=lambda p: (p.rank is None, p.rank or 0, p.host, p.pid, p.device))


def _fill_from_siblings(siblings: Sequence[Process]) -> None:
    """A process logs its version, network and interface once, even if it drives several devices."""
    for name in ("version", "network", "cards", "interface", "address"):
        value_known = next((value for process in siblings if (value := getattr(process, name)) is not None), None)
        for process in siblings:
            if getattr(process, name) is None:
                setattr(process, name, value_known)


def _take(process: Process, line: Line, severity: str, message: str) -> None:
    """Add what one line says."""
    if severity == "WARN":
        process.warnings.append(line)
        return
    if match := _CHANNEL.match(message):
        pair = (int(match[1]), int(match[3]))
        if process.rank is None:  # later lines name it, unless the log is cut off
            process.rank = pair[1] if match[5] == "receive" else pair[0]
        transport = _transport(match[6])
        process.transports.setdefault(pair, Counter())[transport] += 1
        process.lines.setdefault(transport, line)
        for rank, device in ((pair[0], match[2]), (pair[1], match[4])):
            if device is not None:
                process.devices[rank] = device
        if transport.startswith("NET/"):
            process.gdr = bool(process.gdr) or "GDRDMA" in match[6]
        return
    if (match := _RANK.search(message)) and int(match[2]) >= (process.world_size or 0):
        process.rank, process.world_size = int(match[1]), int(match[2])  # the largest communicator is the world
    for name, pattern in (("version", _VERSION), ("network", _NETWORK)):
        if (match := pattern.search(message)) and getattr(process, name) is None:
            setattr(process, name, match[1])
            process.lines[name] = line
    if match := _BOOTSTRAP.search(message) or _OLD_BOOTSTRAP.search(message):
        process.interface, process.address = match[1], match[2]
        process.lines["interface"] = line
    if match := _NET.search(message):
        process.cards = match[2]
        process.lines["cards"] = line
    if match := _GDR.search(message):
        process.gdr = bool(process.gdr) or match[1] == "Enabled"
    if match := _ENVIRONMENT.search(message):
        process.environment[match[1]] = match[2].rstrip(".")
        process.lines[match[1]] = line


def _transport(text: str) -> str:
    """`P2P/IPC`, `P2P/CUMEM`, `SHM`, `NET/IB`, `NET/Socket`, ... without channel, card and mode."""
    if "shared memory" in text:
        return "SHM"
    parts = text.split()[0].split("/")
    return parts[0] if parts[0] == "SHM" else "/".join(parts[:2])


def by_value(processes: Sequence[Process], name: str) -> dict[str, list[Process]]:
    """The processes by their `version`, `fabric` or `interface`. `RDMA` alone is not a fabric of its own."""
    processes_of: dict[str, list[Process]] = {}
    for process in processes:
        if (value := getattr(process, name)) is not None:
            processes_of.setdefault(value, []).append(process)
    if processes_of.keys() & {"InfiniBand", "RoCE"}:
        processes_of.pop(RDMA, None)
    return processes_of


def differences(processes: Sequence[Process]) -> list[str]:
    """A sentence each for version, fabric and interface, if ranks differ in them."""
    sentences = []
    for name in ("version", "fabric", "interface"):
        processes_of = by_value(processes, name)
        if len(processes_of) > 1:
            parts = [f"{value} ({_names(of_value)})" for value, of_value in processes_of.items()]
            sentences.append(f"{'NCCL version' if name == 'version' else name} differs: {'; '.join(parts)}")
    return sentences


def _names(processes: Sequence[Process]) -> str:
    ranks = [process.rank for process in processes if process.rank is not None]
    if len(ranks) == len(processes):
        return ranks_in_words(ranks)
    return ", ".join(sorted({process.name for process in processes})[:6])
