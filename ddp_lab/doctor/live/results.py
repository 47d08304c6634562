"""What `doctor --live` measured, and which pairs of ranks are slow."""

import statistics
from dataclasses import dataclass, field

import msgspec

SLOW = 10.0
"""A pair is slow if it takes this many times as long as a typical fast pair of its kind.

That is the median of the faster half of the pairs within a host, or of those across hosts. One slow rank of three or
four makes half of all pairs slow, so the median of all pairs would hide it.
"""


class Pair(msgspec.Struct):
    """`time_ms`: median of an all-reduce between the two; None if it failed (then with the problem) or never began."""

    ranks: tuple[int, int]
    time_ms: float | None
    problem: str = ""
    across_hosts: bool = False
    is_slow: bool = False


@dataclass
class Live:
    checks: dict[str, str]
    ranks: int = 0
    backend: str = ""
    size_bytes: int = 0
    iterations: int = 0
    pairs: list[Pair] = field(default_factory=list)


def flag_slow_pairs(pairs: list[Pair]) -> list[str]:
    """Mark the pairs that failed or are slow, and say so in a sentence for each."""
    sentences = []
    for across_hosts in (False, True):
        alike = [pair for pair in pairs if pair.across_hosts is across_hosts]
        times = sorted(pair.time_ms for pair in alike if pair.time_ms is not None)
        typical = statistics.median(times[: (len(times) + 1) // 2]) if times else 0.0
        for pair in alike:
            said = pair.problem  # empty if a pair before it failed
            if pair.time_ms is not None and pair.time_ms >= SLOW * typical:
                ratio = pair.time_ms / typical
                said = f"{pair.time_ms:.2f} ms, {ratio:.0f} times the {typical:.2f} ms of fast pairs"
            if said:
                pair.is_slow = True
                sentences.append(f"Ranks {pair.ranks[0]} and {pair.ranks[1]}: {said}.")
    slow = [set(pair.ranks) for pair in pairs if pair.is_slow]
    shared = set.intersection(*slow) if len(slow) > 1 else set()
    return sentences + [f"All of them have rank {rank} in common." for rank in sorted(shared)]
