"""The lines that a pattern can match: those with the text that it demands.

Hundreds of patterns take minutes over a log of hundreds of megabytes. Most patterns demand a text that few lines have.
Lines that differ only in digits count as one, so few different lines remain.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache, cached_property

SHORTEST = 4
"""The fewest characters of a demanded text that is worth a search."""
_ONE_DIGIT = str.maketrans("123456789", "0" * 9)


_PART = re.compile(
    r"(?P<flags>\(\?[aimsux]+\))|(?P<look>\(\?<?[=!])|(?P<open>\((?:\?(?:[imsx]*:|>|P<\w+>))?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<least>[*+?]|\{(?P<count>\d*),?\d*\})[?+]?|(?P<set>[.^$]|\[\^?\]?(?:\\.|[^\]\\])*\]|\\\w)|\\?(?P<text>.)",
    re.DOTALL,
)
"""A part of a pattern in the syntax of `re`, of which these rules use all but conditions and comments."""
_LINE_END = re.compile(r"(?<!\\)(?:\\\\)*\\n|\n")
_NEGATED = re.compile(r"\[\^(?:\\.|[^\]\\])*\]")


@cache
def demanded(pattern: re.Pattern[str]) -> tuple[frozenset[str], bool]:
    """Texts, one of which every match has, in small letters and with 0 for each digit (none if it demands none), and
    whether a match may have a line's end in it."""
    texts = frozenset(text.lower().translate(_ONE_DIGIT) for text in _demanded(_PART.finditer(pattern.pattern)))
    return texts, bool(_LINE_END.search(_NEGATED.sub("", pattern.pattern)))


class Shapes:
    """The different lines of a text, but for digits and for large and small letters."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._indices: dict[str, list[int]] = {}
        for index, line in enumerate(lines):
            self._indices.setdefault(line.lower().translate(_ONE_DIGIT), []).append(index)

    @cached_property
    def _joined_text(self) -> str:
        return "\n".join(self._indices)

    def with_one_of(self, texts: frozenset[str]) -> list[int]:
        """Indices of the lines that have one of `texts`."""
        texts = frozenset(text for text in texts if text in self._joined_text)
        matching = (
            [indices for shape, indices in self._indices.items() if any(text in shape for text in texts)]
            if texts
            else []
        )
        return sorted(index for indices in matching for index in indices)


def _demanded(parts: Iterator[re.Match[str]]) -> set[str]:
    """The set of texts that a group demands whose shortest text is longest; empty if a branch demands none."""
    branches: list[set[str]] = []
    options: list[set[str]] = []
    run, before = "", ""
    for part in parts:
        kind = part.lastgroup or ""
        if kind == "text":
            run += part["text"]
        elif part["least"]:  # of what is before it
            is_there = part["least"].startswith("+") or (part["count"] or "").strip("0") != ""
            if before == "text":
                options.append({run if is_there else run[:-1]})
                run = ""
            elif not is_there and before in ("open", "look"):
                options.pop()
        else:
            options.append({run})
            run = ""
            if kind in ("open", "look"):
                inner = _demanded(parts)
                options.append(inner if kind == "open" else set())
            elif kind in ("bar", "close"):
                branches.append(_longest(options))
                options = []
                if kind == "close":
                    break
        before = kind
    else:
        branches.append(_longest([*options, {run}]))
    return set().union(*branches) if all(branches) else set()


def _longest(options: Iterable[set[str]]) -> set[str]:
    useful = [option for option in options if option and min(map(len, option)) >= SHORTEST]
    return max(useful, key=lambda option: min(map(len, option)), default=set())
