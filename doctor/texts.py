"""Text files as numbered lines, read so that no file can do harm: bounded, without control characters."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

LONGEST_LINE = 4000
"""Characters of a line that are kept. Longer ones are progress bars and dumped tensors."""
LONGEST_FILE = 256 * 2**20
"""Bytes of a file that are read."""

ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


class Line(NamedTuple):
    """One line of a file; numbers begin at 1, as editors count them, and 0 is the whole file."""

    path: str
    number: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.path}:{self.number}" if self.number else self.path


@dataclass(frozen=True)
class Text:
    """A text file. `cut` says that it was longer than what is read of a file."""

    path: str
    lines: list[Line] = field(default_factory=list)
    cut: bool = False

    @cached_property
    def whole(self) -> str:
        """All lines in one string: one search in it is much faster than one in each."""
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

    A carriage return begins a new line too, since progress bars end none otherwise, but not one of its own number.
    """
    decoded = CONTROL.sub("", ANSI.sub("", content[:LONGEST_FILE].decode("utf-8", errors="replace")))
    return Text(path, list(_split(path, decoded)), cut=len(content) > LONGEST_FILE)


def _split(path: str, decoded: str) -> Iterator[Line]:
    for number, whole in enumerate(decoded.split("\n"), 1):
        for part in whole.rstrip("\r").split("\r"):
            yield Line(path, number, part[:LONGEST_LINE])


def printable(text: str) -> str:
    """`text` without codes that would move the cursor, change colours or reorder what a terminal shows."""
    return CONTROL.sub("", ANSI.sub("", text)).replace("\r", " ")


def first_lines(lines: Iterable[Line]) -> list[Line]:
    """Each line once, in the order of files and lines as given."""
    return list(dict.fromkeys(lines))


def list_of(numbers: Iterable[int]) -> str:
    """`0, 1, 4 to 7`: numbers in words, runs of three and more shortened."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0, 2`."""
    ranks = sorted(set(ranks))
    return f"rank{'s' if len(ranks) != 1 else ''} {list_of(ranks)}"


def count_of(number: int, thing: str) -> str:
    """`1 line`, `2,000 lines`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
