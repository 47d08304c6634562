"""Which lines a pattern can match at all: those that have the text that it demands.

Hundreds of patterns over a log of hundreds of megabytes would take minutes. Most demand a text that few lines have, and
lines that differ in digits only are alike, so that there are few different ones to look at.
"""

import re
from collections.abc import Iterable
from functools import cache, cached_property
from re import _constants as op  # type: ignore[attr-defined]  # no public interface gives the parts of a pattern
from re import _parser  # type: ignore[attr-defined]
from typing import Any

SHORTEST = 4
"""Characters of a demanded text that is worth looking for."""
_ONE_DIGIT = str.maketrans("123456789", "0" * 9)


@cache
def demanded(pattern: re.Pattern[str]) -> tuple[frozenset[str], bool]:
    """Texts, one of which every match has, in small letters and with 0 for each digit (none if it demands none), and
    whether a match may have a line's end in it."""
    parsed = _parser.parse(pattern.pattern, pattern.flags)
    found = frozenset(text.lower().translate(_ONE_DIGIT) for text in _demanded(parsed) or ())
    return found, _spans_lines(parsed)


class Shapes:
    """The different lines of a text, but for digits and for large and small letters."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._indices: dict[str, list[int]] = {}
        for index, line in enumerate(lines):
            self._indices.setdefault(line.lower().translate(_ONE_DIGIT), []).append(index)

    @cached_property
    def _whole(self) -> str:
        return "\n".join(self._indices)

    def with_one_of(self, texts: frozenset[str]) -> list[int]:
        """Indices of the lines that have one of `texts`."""
        texts = frozenset(text for text in texts if text in self._whole)
        found = (
            [indices for shape, indices in self._indices.items() if any(text in shape for text in texts)]
            if texts
            else []
        )
        return sorted(index for indices in found for index in indices)


def _demanded(parts: Any) -> set[str] | None:
    """Of the texts that a sequence demands, those of which the shortest is longest."""
    options: list[set[str]] = []
    run = ""
    for kind, value in [*parts, (None, None)]:
        if kind is op.LITERAL and value != ord("\n"):
            run += chr(value)
            continue
        options.append({run})
        run = ""
        if kind is op.SUBPATTERN:
            options.append(_demanded(value[3]) or set())
        elif kind is op.BRANCH:
            branches = [_demanded(branch) for branch in value[1]]
            options.append(set().union(*filter(None, branches)) if all(branches) else set())
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT) and value[0] > 0:
            options.append(_demanded(value[2]) or set())
    useful = [option for option in options if option and min(map(len, option)) >= SHORTEST]
    return max(useful, key=lambda option: min(map(len, option)), default=None)


def _spans_lines(parts: Any) -> bool:
    """Whether a pattern names a line's end."""
    for kind, value in parts:
        if kind is op.LITERAL and value == ord("\n"):
            return True
        if kind is op.IN and value[0][0] is not op.NEGATE and (op.LITERAL, ord("\n")) in value:
            return True
        inner = {
            op.SUBPATTERN: lambda value: [value[3]],
            op.BRANCH: lambda value: value[1],
            op.MAX_REPEAT: lambda value: [value[2]],
            op.MIN_REPEAT: lambda value: [value[2]],
        }.get(kind)
        if inner and any(_spans_lines(each) for each in inner(value)):
            return True
    return False
