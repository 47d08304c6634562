"""Everything that was read, in the form in which rules need it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from ddp_lab.doctor.comparison import Divergence, compare
from ddp_lab.doctor.reading.complaints import Said, read_complaints
from ddp_lab.doctor.reading.flight_recorder import Dump
from ddp_lab.doctor.reading.nccl_json import RasAnswer, Timed
from ddp_lab.doctor.reading.nccl_log import Process, read_processes
from ddp_lab.doctor.reading.stacks import Stack, stacks_in
from ddp_lab.doctor.reading.texts import Line, Text
from ddp_lab.doctor.reading.topology import Topology
from ddp_lab.doctor.reading.watchdog import HANG, GaveUp, Status, Timeout, read_gave_up, read_timeouts, statuses_in
from ddp_lab.machine import Machine
from ddp_lab.record_format import RunEnd

_VIRTUAL = re.compile(
    r"Hypervisor detected|Virtualization: +\S|Hypervisor vendor: +\S"
    r"|\b(?:QEMU|VMware|Xen) (?:Standard|Virtual)|DMI: Amazon EC2"
)
_FAILED = re.compile(
    r"exitcode {0,4}: {0,4}-?[1-9]|return code = -?[1-9]|ChildFailedError|NO_OTHER_FAILURES"
    r"|\[rank\d{1,6}\]:? {0,4}Traceback"
    r"|Signal \d{1,2} \(SIG|[Ee]xit(?:ed with)? (?:exit )?code:? -?[1-9]|terminate called after throwing"
)
_OF_ITSELF = re.compile(
    r"\bWARN |NCCL INFO|\[rank\d{1,6}\]: |NVRM|\bkernel\b|^\[ {0,8}\d{1,9}\.\d{1,6}\]"
    r"|^(?:\[[^\]\n]{1,40}\] )?Out of memory: |oom-kill|slurmstepd|srun: |systemd"
)
_HIP = re.compile(r"\bHIP (?:error|failure|out of memory)|\bRCCL\b|librccl|/hipify/|/opt/rocm|\+rocm\d")
LAST_LINES = 30
"""Lines at the end of a text that may say why it ends."""
EARLY = 3
"""A hang in one of a group's first collectives cannot come from what the program did later: DDP checks and broadcasts
parameters before anything else."""


@dataclass(frozen=True)
class Match:
    """What a predicate finds: lines to quote, and sentences on what they mean in this case."""

    lines: list[Line]
    details: list[str] = field(default_factory=list)


@dataclass
class Facts:
    texts: list[Text] = field(default_factory=list)
    topologies: list[Topology] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    machine: Machine | None = None
    runs: list[tuple[str, RunEnd]] = field(default_factory=list)
    slow_pairs: list[str] = field(default_factory=list)
    answers: list[RasAnswer] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)

    @cached_property
    def processes(self) -> list[Process]:
        return read_processes(self.texts)

    @property
    def of_one_job(self) -> list[Process]:
        """The processes, to be compared; none if a rank is there twice, since then the log has several jobs."""
        ranks = [process.rank for process in self.processes if process.rank is not None]
        return self.processes if len(set(ranks)) == len(ranks) else []

    @cached_property
    def divergences(self) -> list[Divergence]:
        return compare(self.dumps)

    def search(self, pattern: re.Pattern[str]) -> list[Line]:
        """The lines of all texts in which `pattern` is found."""
        return [line for text in self.texts for line in text.search(pattern)]

    @cached_property
    def complaints(self) -> list[Said]:
        """What the texts complain of, of each text by kind and then in its order."""
        return [complaint for text in self.texts for complaint in read_complaints(text)]

    @cached_property
    def failures(self) -> list[Line]:
        """Lines that say that a process of the job failed."""
        return self.search(_FAILED)

    def ended_with(self, lines: Iterable[Line]) -> bool:
        """Whether the job failed or hung; or the text ends soon after one of `lines`; or one of them is from NCCL, the
        kernel or the scheduler, or has torch's prefix of uncaught exceptions. These never report a caught exception."""
        last = {text.path: text.lines[-1].number for text in self.texts if text.lines}
        near = (line.number > last.get(line.path, 0) - LAST_LINES or _OF_ITSELF.search(line.text) for line in lines)
        return bool(self.failures or self.hangs) or any(near)

    @cached_property
    def timeouts(self) -> list[Timeout]:
        return read_timeouts(self.texts)

    @cached_property
    def statuses(self) -> list[Status]:
        return [status for text in self.texts for _, status in statuses_in(text)]

    @cached_property
    def gave_up(self) -> list[GaveUp]:
        return read_gave_up(self.texts)

    @cached_property
    def stacks(self) -> list[Stack]:
        return [stack for text in self.texts for stack in stacks_in(text)]

    @cached_property
    def hangs(self) -> list[Line]:
        """Lines that say that a collective ran out of time."""
        return self.search(HANG)

    @property
    def hung_early(self) -> list[Line]:
        """Evidence that one of the first collectives of a group never ended; empty if there is none."""
        lines = [timeout.line for timeout in self.timeouts if timeout.seq is not None and timeout.seq <= EARLY]
        stuck = [
            divergence for divergence in self.divergences if divergence.kind == "stuck" and divergence.seq <= EARLY
        ]
        return lines + [
            Line(self.dumps[0].path, 0, sentence) for divergence in stuck for sentence in divergence.sentences
        ]

    @property
    def is_own_run(self) -> bool:
        """Whether what was read is of a run of this project."""
        return bool(self.runs) or any(dump.is_own for dump in self.dumps)

    @cached_property
    def is_hip(self) -> bool:
        """Whether the GPUs are AMD's."""
        return bool(self.search(_HIP))

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

    @cached_property
    def is_one_host(self) -> bool:
        """Whether the log has every rank of its largest communicator, all on one host."""
        hosts = {process.host for process in self.processes}
        ranks = {process.rank for process in self.processes} - {None}
        return len(hosts) == 1 and len(ranks) >= max(process.world_size or 2**31 for process in self.processes)
