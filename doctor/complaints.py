"""What a log complains of, whatever rules say: NCCL's warnings, last errors, exceptions and exit codes.

Complaints that differ only in numbers are one, with how often it is there, on which ranks, and where first.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from doctor.diagnosis import Finding
from doctor.facts import Facts
from doctor.reading.texts import Line, Text, ranks_in_words

WARNING, LAST_ERROR, EXCEPTION = "NCCL warning", "last error of NCCL", "exception"
TORCH, END = "error in torch's log", "end of a process"
KINDS = (WARNING, LAST_ERROR, EXCEPTION, TORCH, END)
"""In the order in which they are quoted: what is nearest to the reason comes first."""

_PREFIX = (
    r"^(?:\[?\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}\]? ?|\[\w{1,20}\]:? {0,4}|\d{1,6}: {1,4}"
    r"|\(\w[^()\n]{0,120}pid=\d{1,10}[^()\n]{0,120}\) ?)*"
)
"""Of a line: time, rank, launcher."""
_WORDINGS = {
    WARNING: r"(?::\d{1,10}:\d{1,10} \[\d{1,3}\] .{0,120}?(?:NCCL )?|NCCL |\w\.(?:cc|cu|h):\d{1,5} )WARN (\S.*)",
    LAST_ERROR: r"Last error:(.*)",
    EXCEPTION: _PREFIX + r"((?:[A-Za-z_]\w{0,60}\.){0,6}[A-Z]\w{0,60}(?:Error|Exception|Interrupt)(?:: \S.*|:?[ \t]*$))"
    r"|terminate called after throwing an instance of (\S.*)|^[ \t]{0,4}what\(\): {1,4}(\S.*)"
    r"|((?:[Cc]uda|CUDA) failure .*'[^'\n]{1,200}'|\b[\w./-]{1,100}\.py: error: \S.*)",
    TORCH: r"\[E\d{0,4} ?[\w.:+ -]{0,60}\] ?(\S.*)|\[c10d\] .{0,300}? (timed out after \d.*)",
    END: r"exitcode {0,4}: {0,4}-?[1-9]\d{0,3}|[Ee]xit(?:ed with)?(?: exit)? (?:code|status):? -?[1-9]\d{0,3}"
    r"|Signal \d{1,2} \(SIG\w{1,8}\)|[Ss]egmentation fault|Aborted \(core dumped\)",
}
"""The first group that is found is what is said; without one, all of it."""
_PATTERNS = {kind: re.compile(pattern, re.MULTILINE) for kind, pattern in _WORDINGS.items()}
_ECHO = re.compile(r"ChildFailedError")
"""What torchrun says of the exceptions of others."""
_FRAME = re.compile(r'File "(?P<file>[^"\n]{1,300})", line (?P<line>\d{1,7}), in (?P<where>\S{1,100})')
_RANK = re.compile(r"\[rank(\d{1,6})\]")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
FARTHEST_FRAME = 12
"""Lines between the last frame of a traceback and the exception."""


@dataclass
class Complaint:
    """Lines that say the same but for numbers. `detail`: where the exception was raised, if that is known."""

    kind: str
    text: str
    lines: list[Line]
    ranks: set[int] = field(default_factory=set)
    detail: str = ""

    @property
    def summary(self) -> str:
        """`3 times, ranks 0, 2, first at train.log:7`."""
        times = f"{len(self.lines):,} times, " if len(self.lines) > 1 else ""
        ranks = f"{ranks_in_words(self.ranks)}, " if self.ranks else ""
        return f"{times}{ranks}{'first at ' if times else ''}{self.lines[0].place}{self.detail}"


def unexplained(facts: Facts, findings: Sequence[Finding]) -> list[Complaint]:
    """The complaints of which no finding quotes a line: by kind, then in the order of the log."""
    explained = {_alike(line.text) for finding in findings for line in finding.lines}
    ranks = {line: process.rank for process in facts.processes for line in process.warnings}
    found: dict[tuple[str, str], Complaint] = {}
    for text in facts.texts:
        for kind, said, line, detail in _complaints(text):
            complaint = found.setdefault((kind, _alike(said)), Complaint(kind, said, [], detail=detail))
            complaint.lines.append(line)
            match = _RANK.search(line.text)
            rank = int(match[1]) if match else ranks.get(line)
            if rank is not None:
                complaint.ranks.add(rank)
    left = [one for one in found.values() if not any(_alike(line.text) in explained for line in one.lines)]
    return sorted(left, key=lambda complaint: KINDS.index(complaint.kind))


def _complaints(text: Text) -> Iterator[tuple[str, str, Line, str]]:
    """Kind, what is said, the line and a detail of each complaint."""
    for kind, pattern in _PATTERNS.items():
        for index in text.indices(pattern):
            if (match := pattern.search(text.lines[index].text)) is None:
                continue
            said = next((part for part in match.groups() if part is not None), match[0]).strip()
            if kind == LAST_ERROR and not said and index + 1 < len(text.lines):
                said = text.lines[index + 1].text.strip()
            if not _ECHO.search(said):
                yield kind, said, text.lines[index], _raised_at(text, index) if kind == EXCEPTION else ""


def _raised_at(text: Text, index: int) -> str:
    """Where the last frame above an exception is."""
    for line in reversed(text.lines[max(0, index - FARTHEST_FRAME) : index]):
        if match := _FRAME.search(line.text):
            return f", raised in {match['file']}:{match['line']} ({match['where']})"
    return ""


def _alike(text: str) -> str:
    """What is the same in texts that differ in numbers."""
    return _NUMBER.sub("N", text).strip()
