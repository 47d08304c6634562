"""Calls of collectives as ranks issued them: where ranks differ, who is behind, and who waits for whom for ever."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ddp_lab.collectives.kinds import ENDS, UNEVEN
from ddp_lab.collectives.ranks import ranks_of

ISSUED, QUEUED, STARTED, COMPLETED = ("issued", "queued", "started", "completed")
"""Of a call. One that is done when `Work.wait` returns goes from `issued` to `completed`, one that a device runs
through the others."""
ON_DEVICE = {QUEUED: 0, "scheduled": 0, STARTED: 1, COMPLETED: 2}
"""How far a device is with a collective that it runs: not there yet (in torch's words, `scheduled`), in it, past it."""


@dataclass(frozen=True)
class Call:
    """A collective that a rank has issued.

    Attributes:
        seq: Sequence number in its process group, from 1.
        elements: Of the whole tensor: for a gather or scatter, of all ranks together. Or sizes, as torch's dumps have
            them: `8x4 and 3`.
        root: Rank in the group that sends or receives everything; -1 for collectives without a root.
        parameter: For an all-reduced gradient, the number of its trainable parameter, from 1; 0 if that is not known.
        state: `ISSUED` and so on, or torch's words.
        time_s: When it was issued, in seconds since the epoch.
    """

    seq: int
    kind: str
    elements: int | str
    dtype: str
    group: str
    root: int = -1
    parameter: int = 0
    state: str = ISSUED
    time_s: float = 0.0

    @property
    def signature(self) -> str:
        """`all_reduce of 10 float32`, and what else must be the same on all ranks."""
        text = f"{self.kind} of {self.elements} {self.dtype}" if self.elements else self.kind
        text += f" from or to rank {self.root}" if self.root >= 0 else ""
        return text + (f" (gradient of trainable parameter {self.parameter - 1})" if self.parameter else "")

    def __str__(self) -> str:
        return f"{self.kind} #{self.seq}" + (f" of {self.elements} {self.dtype}" if self.elements else "")


Issued = Mapping[int, Collection[Call]]
"""By rank."""


def differ(calls: Collection[Call]) -> bool:
    """Whether calls of several ranks at one place of a group are not the same collective."""
    signatures = {(c.kind, *(() if c.kind in UNEVEN else (c.elements, c.dtype, c.root))) for c in calls}
    return len(signatures) > 1 or len({call.parameter for call in calls if call.parameter}) > 1


def ranks_by_call(calls: Mapping[int, Call]) -> dict[str, list[int]]:
    """Which ranks issued what."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        ranks[call.signature].append(rank)
    return ranks


def first_difference(issued: Issued) -> dict[int, Call]:
    """The first collective of a process group that is not the same on all ranks that have issued it, by rank; empty if
    none differs. What only some ranks have recorded is not compared, and messages are not."""
    places: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
    for rank, calls in issued.items():
        for call in calls:
            if call.kind not in ENDS:
                places[call.group, call.seq][rank] = call
    differing = [calls for calls in places.values() if differ(calls.values())]
    return min(differing, key=lambda calls: min(call.time_s for call in calls.values()), default={})


def behind(issued: Issued, awaited: Call) -> list[int]:
    """The ranks that have not issued `awaited`, of those that its group's name has; of all if it names none."""

    def latest(calls: Iterable[Call]) -> int:
        return max((call.seq for call in calls if call.group == awaited.group), default=0)

    members = ranks_of(awaited.group) or issued
    return [rank for rank, calls in issued.items() if rank in members and latest(calls) < awaited.seq]


def deadlock(issued: Issued, waits_for: Mapping[int, Call]) -> dict[int, list[int]]:
    """For each rank, the others that have not issued the collective in which it waits; empty if one will go on.

    If none goes on, no rank issues anything more. Ranks that issue the same collectives in the same order never get
    into this state.
    """
    if len(waits_for) < max(2, len(issued)) or any(call.kind in ENDS for call in waits_for.values()):
        return {}
    missing = {}
    for rank, awaited in waits_for.items():
        of_group = {rank: calls for rank, calls in issued.items() if any(c.group == awaited.group for c in calls)}
        missing[rank] = behind(of_group, awaited)
    return missing if all(missing.values()) else {}


def slow_devices(calls: Mapping[int, Call]) -> list[int]:
    """Ranks that have issued a collective, but whose devices are further from its end than others."""
    places = {rank: ON_DEVICE[call.state] for rank, call in calls.items() if call.state in ON_DEVICE}
    least, most = min(places.values(), default=0), max(places.values(), default=0)
    may_end_alone = any(call.root >= 0 for call in calls.values())  # a root that only sends waits for nobody
    if least == most or (may_end_alone and least > 0):
        return []
    return [rank for rank, place in places.items() if place == least]
