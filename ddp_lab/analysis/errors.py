"""Lists in messages."""

from collections.abc import Sequence

MOST_LISTED = 12


def listed(things: Sequence[object]) -> str:
    """`a`; `a and b`; `a, b and c`; of many, the first few and how many more."""
    if len(things) > MOST_LISTED:
        return f"{', '.join(map(str, things[:MOST_LISTED]))} and {len(things) - MOST_LISTED} more"
    names = [str(thing) for thing in things]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
