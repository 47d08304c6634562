"""The complaints of a log that no rule explains, so that nothing is hidden.

Complaints that differ only in numbers count as one, and so do process exits that mean the same. Each has its count,
its ranks and its first place.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from ddp_lab.collectives.ranks import ranks_in_words
from ddp_lab.doctor.diagnosis import Finding
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.reading.complaints import END, KINDS
from ddp_lab.doctor.reading.texts import JOB_RANK, Line

_NUMBER = re.compile(
    r"((?:\b(?:exit(?:ed with)?(?: ?code)?|exitcode|errorcode|status|error|signal|return code)[ :=(]{0,6}-?)?)"
    r"(0x[0-9a-fA-F]+|\d+)",
    re.IGNORECASE,
)


class Meaning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a warning or an exit code means that is no fault, or not always one (`meanings.toml`). `pattern`: a regular
    expression that its text has. `is_harmless`: healthy machines say it, too."""

    pattern: str
    says: str
    source: str
    is_harmless: bool = False


@cache
def all_meanings() -> list[Meaning]:
    content = Path(__file__).with_name("meanings.toml").read_bytes()
    return msgspec.toml.decode(content, type=dict[Literal["meaning"], list[Meaning]])["meaning"]


@dataclass
class Complaint:
    """Lines that say the same but for numbers. `where`: the frame that raised an exception, if it is known."""

    kind: str
    text: str
    lines: list[Line]
    ranks: set[int] = field(default_factory=set)
    where: str = ""

    @property
    def meaning(self) -> Meaning | None:
        """The meaning by the source of NCCL or torch, if it is known."""
        return next((meaning for meaning in all_meanings() if re.search(meaning.pattern, self.text)), None)

    @property
    def summary(self) -> str:
        """`3 times, ranks 0, 2, first at train.log:7`."""
        times = f"{len(self.lines):,} times, " if len(self.lines) > 1 else ""
        ranks = f"{ranks_in_words(self.ranks)}, " if self.ranks else ""
        where = f", raised in {self.where}" if self.where else ""
        return f"{times}{ranks}{'first at ' if times else ''}{self.lines[0].place}{where}"


def unexplained(facts: Facts, findings: Sequence[Finding]) -> list[Complaint]:
    """The complaints of which no finding quotes a line: by kind, then in the order of the log."""
    explained = {_alike(line.text) for finding in findings for line in finding.lines + finding.explained}
    ranks = {line: process.rank for process in facts.processes for line in process.warnings}
    complaints: dict[tuple[str, str], Complaint] = {}
    for kind, text, line, where in facts.complaints:
        new = Complaint(kind, text, [], where=where)
        key = new.meaning.says if kind == END and new.meaning else _alike(text)
        complaint = complaints.setdefault((kind, key), new)
        complaint.lines.append(line)
        match = JOB_RANK.search(line.text)
        rank = int(match[1]) if match else ranks.get(line)
        if rank is not None:
            complaint.ranks.add(rank)
    unquoted = [
        complaint
        for complaint in complaints.values()
        if not explained & {_alike(complaint.text), *(_alike(line.text) for line in complaint.lines)}
    ]
    return sorted(unquoted, key=lambda complaint: KINDS.index(complaint.kind))


def _alike(text: str) -> str:
    """The text without ranks, processes, addresses and times. Codes of errors stay."""
    return _NUMBER.sub(lambda match: match[0] if match[1] else "N", text).strip()
