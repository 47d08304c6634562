"""Everything that was read, in the form in which rules need it."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from doctor.comparison import Divergence, compare
from doctor.live.machine import Machine
from doctor.reading.flight_recorder import Dump
from doctor.reading.nccl_log import Process, read_processes
from doctor.reading.texts import Line, Text
from doctor.reading.topology import Topology

_WATCHDOG = re.compile(
    r"Rank (\d{1,6})\] ?Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,12}), OpType=(\w{1,40})"
    r"(?:, NumelIn=(\d{1,15}), NumelOut=(\d{1,15}))?"
)
_NCCL2 = re.compile(
    r"(?:\[rank(\d{1,6})\]:[^\n]{0,120}?)?\[TC\]\[rank=(\d{1,6})\]\[name=([^\]\n]{0,120})\] "
    r"(?:Operation timed out after (\d{1,12}) ms|Aborting process on rank \d{1,6} due to timeout)"
)
_ENQUEUED = re.compile(
    r"\[PG ([^\]]{0,120}) ?Rank (\d{1,6})\].{0,300}last enqueued NCCL work: (-?\d{1,12}), "
    r"last completed NCCL work: (-?\d{1,12})"
)
_HANG = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for|Heartbeat monitor timed out"
    r"|Received a dump signal due to a collective timeout|\[TC\].{0,140} (?:Operation timed out after|due to timeout)",
)
_VIRTUAL = re.compile(
    r"Hypervisor detected|Virtualization: +\S|Hypervisor vendor: +\S"
    r"|\b(?:QEMU|VMware|Xen) (?:Standard|Virtual)|DMI: Amazon EC2"
)
EARLY = 3
"""A hang in one of a group's first collectives cannot come from what the program did later: DDP checks and broadcasts
parameters before anything else."""


@dataclass(frozen=True)
class Match:
    """What a predicate finds: lines to quote, and sentences on what they mean in this case."""

    lines: list[Line]
    details: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Timeout:
    """A collective that torch's NCCL watchdog gave up."""

    rank: int
    seq: int
    kind: str
    elements: tuple[str | None, str | None]
    line: Line


@dataclass(frozen=True)
class GaveUp:
    """A collective that ran out of time in torch's `nccl` of 2.15, which does not say which one it was.

    Attributes:
        rank: In the whole job if the line has torch's prefix, else in the group.
        seconds: None in the line that ends the process.
    """

    rank: int
    group: str
    seconds: float | None
    line: Line


@dataclass(frozen=True)
class Progress:
    """How many collectives of a group a rank had issued when its watchdog gave up."""

    group: str
    rank: int
    enqueued: int
    line: Line


@dataclass
class Facts:
    texts: list[Text] = field(default_factory=list)
    topologies: list[Topology] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    machine: Machine | None = None
    runs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    slow_pairs: list[str] = field(default_factory=list)

    @cached_property
    def processes(self) -> list[Process]:
        return read_processes(self.texts)

    @cached_property
    def divergences(self) -> list[Divergence]:
        return compare(self.dumps)

    def search(self, pattern: re.Pattern[str]) -> list[Line]:
        """The lines of all texts in which `pattern` is found."""
        return [line for text in self.texts for line in text.search(pattern)]

    @cached_property
    def timeouts(self) -> list[Timeout]:
        return [
            Timeout(int(match[1]), int(match[2]), match[3], (match[4], match[5]), line)
            for line, match in self._matches(_WATCHDOG)
        ]

    @cached_property
    def gave_up(self) -> list[GaveUp]:
        return [
            GaveUp(int(match[1] or match[2]), match[3], int(match[4]) / 1e3 if match[4] else None, line)
            for line, match in self._matches(_NCCL2)
        ]

    @cached_property
    def progress(self) -> list[Progress]:
        return [
            Progress(match[1].strip(), int(match[2]), int(match[3]), line) for line, match in self._matches(_ENQUEUED)
        ]

    @cached_property
    def hangs(self) -> list[Line]:
        """Lines that say that a collective ran out of time."""
        return self.search(_HANG)

    @property
    def hung_early(self) -> list[Line]:
        """Evidence that one of the first collectives of a group never ended; empty if there is none."""
        lines = [timeout.line for timeout in self.timeouts if timeout.seq <= EARLY]
        stuck = [found for found in self.divergences if found.what == "stuck" and found.seq <= EARLY]
        return lines + [Line(self.dumps[0].path, 0, sentence) for found in stuck for sentence in found.sentences]

    @property
    def is_own_run(self) -> bool:
        """Whether what was read is of a run of this project."""
        return bool(self.runs) or any(dump.is_own for dump in self.dumps)

    @cached_property
    def is_virtual(self) -> bool | None:
        """Whether this is a virtual machine; None if unknown."""
        if self.machine:
            return self.machine.is_virtual
        return True if self.search(_VIRTUAL) else None

    @cached_property
    def is_multi_node(self) -> bool:
        """Whether the log has ranks of several hosts, or ranks of one host that use the network."""
        hosts = {process.host for process in self.processes}
        return len(hosts) > 1 or any(process.used("NET/") for process in self.processes)

    def _matches(self, pattern: re.Pattern[str]) -> list[tuple[Line, re.Match[str]]]:
        return [(line, match) for line in self.search(pattern) if (match := pattern.search(line.text))]
