"""Text files as numbered lines, bounded and without control characters, so that no file can do harm."""

import codecs
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ddp_lab.doctor.reading.literals import Shapes, demanded

LONGEST_LINE = 4000
"""Characters of a line. A longer one, such as a dumped tensor, becomes several with the same number."""
OVERLAP = 600
"""Characters that such a line shares with the next, so that one of both has the whole match."""
NARROWEST_TERMINAL, WIDEST_TERMINAL = 60, 250
"""Bounds of a terminal's width, in characters. If the longest line of a text lies within, its lines may be wrapped."""
MOST_WRAPPED = 8
"""Lines that are joined to one."""

JOB_RANK = re.compile(r"\[rank(\d{1,6})\]")
"""Torch's prefix of a line: the rank in the job."""
ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
LAUNCHERS = (
    r"\[?\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}+(?:Z|[+-]\d\d:?\d\d)?\]? ?(?:std(?:out|err) [FP] )?",  # Kubernetes, CRI
    r"\[(?!rank)[a-z]\w{0,18}\d\]: ?|\[pod/[\w./-]{1,200}\] |[\w-]{1,40}-\d{1,6}: ",  # torchrun, kubectl, DeepSpeed
    r"[EWIFC]\d{4} \d\d:\d\d:[\d.]{2,12} \d{1,16} [\w./<>-]{1,200}:\d{1,6}\] ",  # torch's loggers, as elastic's
    r"\[(?:rank: |RANK )\d{1,6}\] ?",  # Lightning, accelerate
    r"(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]{1,60}:\d{1,6}\] ",  # vLLM
    r"\((?:\w[^()\n]{0,120})?\b(?:pid|ip)=[\w.:]{1,60}[^()\n]{0,120}\) ?",  # Ray
    r"\[(?:[\w.-]{1,100}@)?\d{1,6},\d{1,6}\](?:\[[\w.-]{1,100}\])?<\w{3,6}>: ?|\d{1,6}: {1,4}",  # mpirun, srun
)
"""What launchers write before a line."""
_LAUNCHED = re.compile("(?>{0})*+({1}:? ?)?(?>{0})*+".format("|".join(LAUNCHERS), JOB_RANK.pattern))
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]+")


class Line(NamedTuple):
    """One line of a file. Numbers begin at 1, as in editors; 0 is the whole file. `before`: what a launcher wrote."""

    path: str
    number: int
    text: str
    before: str = ""

    @property
    def full(self) -> str:
        return self.before + self.text

    @property
    def place(self) -> str:
        return f"{self.path}:{self.number}" if self.number else self.path


@dataclass(frozen=True)
class Text:
    """A text file without its blank lines. A number that several lines have is of one long line.

    Attributes:
        joined: Index of the first of several lines that a terminal has wrapped, and all of them as one.
        width: Of that terminal, in characters.
    """

    path: str
    lines: list[Line] = field(default_factory=list)
    joined: list[tuple[int, Line]] = field(default_factory=list)
    width: int = 0

    @cached_property
    def _searched(self) -> list[tuple[int, Line]]:
        return [*enumerate(self.lines), *self.joined]

    @cached_property
    def joined_text(self) -> str:
        """All lines in one string, since one search in it is much faster than one in each line."""
        return "\n".join(line.text for _, line in self._searched)

    @cached_property
    def _shapes(self) -> Shapes:
        return Shapes(line.text for _, line in self._searched)

    @cached_property
    def _starts(self) -> list[int]:
        starts, position = [], 0
        for _, line in self._searched:
            starts.append(position)
            position += len(line.text) + 1
        return starts

    def find(self, pattern: re.Pattern[str]) -> list[tuple[int, Line]]:
        """Index in `lines` and the line, for each match of `pattern` (compiled with `re.MULTILINE` if it has anchors).
        Of a joined line only matches count that cross a wrap."""
        matches: dict[tuple[int, str], tuple[int, Line]] = {}
        for place, match, start in self._matches(pattern):
            index, line = self._searched[place]
            start += len(line.before)
            if place < len(self.lines) or start // self.width != (start + len(match[0]) - 1) // self.width:
                matches.setdefault((line.number, match[0]), (index, line))
        return sorted(dict(reversed(matches.values())).items())

    def _matches(self, pattern: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str], int]]:
        """Index in `_searched`, the match, and where in the line it begins."""
        texts, spans_lines = demanded(pattern)
        places = self._shapes.with_one_of(texts) if texts else None
        if places == []:
            return
        if places is None or spans_lines:
            for match in pattern.finditer(self.joined_text):
                place = bisect_right(self._starts, match.start()) - 1
                yield place, match, match.start() - self._starts[place]
            return
        for place in places:
            if hit := pattern.search(self._searched[place][1].text):
                yield place, hit, hit.start()

    def search(self, pattern: re.Pattern[str]) -> list[Line]:
        return [line for _, line in self.find(pattern)]


def to_text(path: str, head: bytes, tail: bytes = b"", left_out: tuple[int, int] = (0, 0)) -> Text:
    """Lines without terminal codes and without what launchers put before them, each at most `LONGEST_LINE` characters.

    A carriage return begins a new line too, since progress bars end no line otherwise. That line has the same number.

    Args:
        left_out: Bytes and lines between `head` and `tail`, the end of the file.
    """
    encoding = encoding_of(head)
    if not left_out[0]:
        head, tail = head + tail, b""
    if encoding != "utf-8":  # two bytes a character
        tail = tail[(len(head) + left_out[0]) % 2 :]
        head = head[: len(head) // 2 * 2]
    first = _clean(head, encoding)
    lines = list(_split(path, first, 1))
    if tail:
        lines += _split(path, _clean(tail, encoding), first.count("\n") + 1 + left_out[1])
    width = _terminal_width(lines)
    return Text(path, lines, list(_joined(lines, width)) if width else [], width)


def encoding_of(content: bytes) -> str:
    """`utf-16` with or without its mark, which PowerShell writes, or `utf-8`."""
    start = content[:4096]
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16-le" if start.startswith(codecs.BOM_UTF16_LE) else "utf-16-be"
    for encoding, zeros in (("utf-16-le", start[1::2]), ("utf-16-be", start[::2])):
        if len(start) >= 8 and zeros.count(0) > 0.7 * len(zeros) and start.count(0) < 0.6 * len(start):
            return encoding
    return "utf-8"


def _clean(content: bytes, encoding: str) -> str:
    return CONTROL.sub("", ANSI.sub("", content.decode(encoding, errors="replace").removeprefix("\ufeff")))


def _split(path: str, decoded: str, first: int) -> Iterator[Line]:
    for number, text in enumerate(decoded.split("\n"), first):
        for part in text.rstrip("\r").split("\r") if text else ():
            for start in range(0, max(1, len(part) - OVERLAP), LONGEST_LINE - OVERLAP):
                line = bare(Line(path, number, part[start : start + LONGEST_LINE]))
                if line.text or not line.before:
                    yield line


def bare(line: Line) -> Line:
    """`line` with its launcher's part in `before`. Torch's own `[rank3]: ` stays."""
    match = _LAUNCHED.match(line.text)
    if not match or not match[0] or match[0] == match[1]:
        return line
    rank = match[1] or ""
    return line._replace(text=rank + line.text[match.end() :], before=match[0].replace(rank, "", 1))


def _terminal_width(lines: Sequence[Line]) -> int:
    """Of the terminal that has wrapped these lines: that of the longest, if another fills it too; 0 if none has."""
    width = max((len(line.full) for line in lines), default=0)
    full = sum(len(line.full) >= width - 1 for line in lines)
    return width if NARROWEST_TERMINAL <= width <= WIDEST_TERMINAL and full > 1 else 0


def _joined(lines: Sequence[Line], width: int) -> Iterator[tuple[int, Line]]:
    """Each line that fills the whole width of a terminal, and those after it, as one."""
    index = 0
    while index < len(lines):
        end = index
        while end - index < MOST_WRAPPED and end + 1 < len(lines) and len(lines[end].full.rstrip()) >= width - 1:
            end += 1
        if end > index:
            parts = [line.full.rstrip().ljust(width) for line in lines[index:end]]
            yield index, bare(Line(lines[index].path, lines[index].number, "".join(parts) + lines[end].full))
        index = end + 1


def printable(text: str) -> str:
    """`text` without codes that move a terminal's cursor, change its colours or reorder its text."""
    clean = CONTROL.sub("", ANSI.sub("", text)).replace("\r", " ").replace("\n", " ")
    return clean.encode(errors="replace").decode()


def count_of(number: int, thing: str) -> str:
    """`1 line`, `2,000 lines`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
