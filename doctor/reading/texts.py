"""Text files as numbered lines, bounded and without control characters, so that no file can do harm."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

LONGEST_LINE = 4000
"""Characters kept of a line. Longer lines are progress bars and dumped tensors."""
LONGEST_FILE = 256 * 2**20
"""Bytes of a file that are read."""

ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


class InputError(Exception):
    """A file that cannot be used. The message says in one line which file, where and why."""


class Line(NamedTuple):
    """One line of a file. Numbers begin at 1, as in editors; 0 is the whole file."""

    path: str
    number: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.path}:{self.number}" if self.number else self.path


@dataclass(frozen=True)
class Text:
    """A text file. `cut`: it is longer than the part that was read."""

    path: str
    lines: list[Line] = field(default_factory=list)
    cut: bool = False

    @cached_property
    def whole(self) -> str:
        """All lines in one string, since one search in it is much faster than one in each line."""
        return "\n".join(line.text for line in self.lines)

    @cached_property
    def _starts(self) -> list[int]:
        starts, position = [], 0
        for line in self.lines:
            starts.append(position)
            position += len(line.text) + 1
        return starts

    def indices(self, pattern: re.Pattern[str]) -> list[int]:
        """Indices of the lines in which `pattern` (compiled with `re.MULTILINE`, if it has anchors) is found."""
        found = (bisect_right(self._starts, match.start()) - 1 for match in pattern.finditer(self.whole))
        return list(dict.fromkeys(found))

    def search(self, pattern: re.Pattern[str]) -> list[Line]:
        return [self.lines[index] for index in self.indices(pattern)]


def to_text(path: str, content: bytes) -> Text:
    """Lines of `content`, without terminal codes, each at most `LONGEST_LINE` characters.

    A carriage return begins a new line too, since progress bars end no line otherwise. That line has the same number.
    """
    decoded = CONTROL.sub("", ANSI.sub("", content[:LONGEST_FILE].decode("utf-8", errors="replace")))
    return Text(path, list(_split(path, decoded)), cut=len(content) > LONGEST_FILE)


def _split(path: str, decoded: str) -> Iterator[Line]:
    for number, whole in enumerate(decoded.split("\n"), 1):
        for part in whole.rstrip("\r").split("\r"):
            yield Line(path, number, part[:LONGEST_LINE])


def printable(text: str) -> str:
    """`text` without codes that move a terminal's cursor, change its colours or reorder its text."""
    return CONTROL.sub("", ANSI.sub("", text)).replace("\r", " ")


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2` or `ranks 0, 1, 4 to 7`: runs of three and more are shortened."""
    numbers = sorted(set(ranks))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(parts)}"


def count_of(number: int, thing: str) -> str:
    """`1 line`, `2,000 lines`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
