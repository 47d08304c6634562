"""What `doctor --live` measured, and which pairs of ranks are slow."""

import statistics
from dataclasses import dataclass, field

import msgspec

SIZE_BYTES = 4 * 2**20
"""Of an all-reduce."""
SLOW = 10.0
"""A pair is slow if it takes this many times as long as a typical fast pair of its kind.

That is the median of the faster half of the pairs within a host, or of those across hosts. One slow rank of three or
four makes half of all pairs slow, so the median of all pairs would hide it.
"""


class Pair(msgspec.Struct):
    """`time_ms`: median of an all-reduce between the two ranks."""

    ranks: tuple[int, int]
    time_ms: float
    across_hosts: bool = False
    is_slow: bool = False


@dataclass
class Live:
    checks: dict[str, str]
    backend: str = ""
    pairs: list[Pair] = field(default_factory=list)


def flag_slow_pairs(pairs: list[Pair]) -> list[str]:
    """Mark the pairs that are slow, and say so in a sentence for each."""
    sentences = []
    for across_hosts in (False, True):
        alike = [pair for pair in pairs if pair.across_hosts is across_hosts]
        times = sorted(pair.time_ms for pair in alike)
        typical = statistics.median(times[: (len(times) + 1) // 2]) if times else 0.0
        for pair in alike:
            pair.is_slow = pair.time_ms >= SLOW * typical
            if pair.is_slow:
                times_as_long = f"{pair.time_ms / typical:.0f} times the {typical:.2f} ms of fast pairs"
                sentences.append(f"Ranks {pair.ranks[0]} and {pair.ranks[1]}: {pair.time_ms:.2f} ms, {times_as_long}.")
    slow = [set(pair.ranks) for pair in pairs if pair.is_slow]
    shared = set.intersection(*slow) if len(slow) > 1 else set()
    return sentences + [f"All of them have rank {rank} in common." for rank in sorted(shared)]
