"""Do ranks issue the same collectives in the same order? Compares what their flight recorders hold."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ddp_lab.collectives.kinds import ENDS, UNEVEN
from ddp_lab.runtime.watch.rank_state import NUMBERS, Entry, RankNames, RankState

ADVICE = "ranks must issue the same collectives in the same order"


@dataclass(frozen=True)
class Mismatch:
    """Collectives that do not fit together.

    Attributes:
        text: What differs, for the user.
        entries: By rank, the collective in which it differs from the others.
    """

    text: str
    entries: Mapping[int, Entry]


def find_difference(issued: Mapping[int, Sequence[Entry]], names: RankNames = NUMBERS) -> Mismatch | None:
    """The first collective of a process group that is not the same on all ranks that have issued it.

    Args:
        issued: By rank. What only some ranks have recorded is not compared.
    """
    same_place: dict[tuple[str, int], dict[int, Entry]] = defaultdict(dict)
    for rank, entries in issued.items():
        for entry in entries:
            if entry.kind in ENDS:
                continue
            same_place[entry.group, entry.seq][rank] = entry
    differing = [
        entries
        for entries in same_place.values()
        if any(differ(one, other) for one, other in combinations(entries.values(), 2))
    ]
    if not differing:
        return None
    first = min(differing, key=lambda entries: min(entry.time_s for entry in entries.values()))
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    for rank, entry in first.items():
        ranks_by_text[describe(entry)].append(rank)
    parts = "; ".join(f"rank {names(*ranks)} {text}" for text, ranks in ranks_by_text.items())
    seq = next(iter(first.values())).seq
    return Mismatch(f"collective #{seq} differs between ranks: {parts}", first)


def differ(one: Entry, other: Entry) -> bool:
    if one.kind != other.kind:
        return True
    if one.kind in UNEVEN:
        return False
    if (one.elements, one.dtype, one.root) != (other.elements, other.dtype, other.root):
        return True
    return bool(one.parameter and other.parameter and one.parameter != other.parameter)


def describe(entry: Entry) -> str:
    text = f"{entry.kind} of {entry.elements} {entry.dtype or 'elements'}"
    if entry.root >= 0:
        text += f" from or to rank {entry.root}"
    return text + (f" (gradient of trainable parameter {entry.parameter - 1})" if entry.parameter else "")


def find_deadlock(states: Mapping[int, RankState], names: RankNames = NUMBERS) -> Mismatch | None:
    """Ranks that wait for each other for ever in collectives of different process groups.

    They do if every rank waits for a collective that another one of them has not issued: then no rank issues anything
    more. Ranks that issue the same collectives in the same order never get into this state.
    """
    latest = {rank: {entry.group: entry.seq for entry in state.entries} for rank, state in states.items()}
    waiting = {rank: state.waits_for for rank, state in states.items() if state.waits_for is not None}
    if len(waiting) < max(2, len(states)) or any(awaited.kind in ENDS for awaited in waiting.values()):
        return None
    parts = []
    for rank, awaited in waiting.items():
        missing = [other for other, seqs in latest.items() if seqs.get(awaited.group, awaited.seq) < awaited.seq]
        if not missing:
            return None
        text = f"waits in {awaited} ({awaited.group}), which rank {names(*missing)} has not issued"
        parts.append(f"rank {names(rank)} {text}")
    return Mismatch(f"collective differs between ranks: {'; '.join(parts)}", waiting)
