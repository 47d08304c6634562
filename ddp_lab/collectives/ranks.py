"""Ranks as text: `0,2`, `0-3,8`, and more than two at equal distances `0-6 by 2`. And names of groups of ranks."""

import re
import zlib
from collections.abc import Iterable
from functools import cache
from itertools import pairwise

MOST_RANKS = 10**6
"""More in one text are an error in it."""
LONGEST_NAME = 120
PART = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?: by (\d{1,6}))?)?")
NAMED = re.compile(r"ranks (?P<ranks>\d[\d, -]*(?: by \d+)?)(?P<rest>(?:, [a-z].*?)?(?: \(\d+\))?)")
"""A group whose name says its ranks: `ranks 0,2`, `ranks 0-3, tp`, `ranks 0,1 (2)`."""


class Ranks(tuple[int, ...]):
    """Ranks in the order of their group."""

    @classmethod
    def parse(cls, text: str) -> "Ranks":
        """
        Raises:
            ValueError: names the part that is neither a rank nor a range.
        """
        ranks: list[int] = []
        for part in text.split(","):
            match = PART.fullmatch(part.strip())
            if match is None or int(match[2] or match[1]) < int(match[1]) or len(ranks) > MOST_RANKS:
                raise ValueError(f"'{part.strip()}' is neither a rank nor a range; write it like 0,1,8 or 0-3")
            ranks += range(int(match[1]), int(match[2] or match[1]) + 1, max(1, int(match[3] or 1)))
        return cls(ranks)

    @property
    def parts(self) -> list[str]:
        distances = {after - before for before, after in pairwise(self)}
        if len(self) > 2 and len(distances) == 1 and (distance := distances.pop()) > 1:
            return [f"{self[0]}-{self[-1]} by {distance}"]
        runs: list[list[int]] = []
        for rank in self:
            if runs and rank == runs[-1][-1] + 1:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        return [text for run in runs for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]

    def __str__(self) -> str:
        return ",".join(self.parts)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0, 1, 4-7`."""
    ordered = Ranks(sorted(set(ranks)))
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(ordered.parts)}"


def group_name(ranks: Ranks, purpose: str = "", number: int = 1) -> str:
    """The name of a group, the same on all its ranks, different for other ranks, in at most `LONGEST_NAME` bytes.

    Args:
        purpose: What the group is for, such as its dimension of a mesh.
        number: Counts groups of the same ranks that are for the same, from 1.
    """
    name = f"ranks {ranks}{', ' * bool(purpose)}{purpose}{f' ({number})' if number > 1 else ''}"
    encoded = name.encode()
    return name if len(encoded) <= LONGEST_NAME else f"{len(ranks)} ranks {zlib.crc32(encoded):08x}"


@cache
def ranks_of(name: str) -> Ranks:
    """The ranks of a group with this name; empty if it does not say."""
    named = NAMED.fullmatch(name)
    try:
        return Ranks.parse(named["ranks"]) if named else Ranks()
    except ValueError:
        return Ranks()
