"""Flight-recorder dumps held against each other: the first collective at which ranks part, and who is behind.

As torch's own analyzer (torch.distributed.flight_recorder), collectives of one process group are matched by sequence
number, and kinds whose sizes may rightly differ between ranks are compared by kind only. Rings hold the last entries
of each rank, so comparison begins where every rank's ring does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from doctor.flight_recorder import Call, Dump
from doctor.texts import Line, ranks_in_words

UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "all_gather_v", "reduce_scatter_v", "coalesced", "barrier")
"""Collectives that may move different sizes on different ranks."""

DEFAULT_GROUP = "default_pg"
"""What torch calls the group of all ranks."""


@dataclass(frozen=True)
class Parting:
    """Where ranks part in one group.

    `differ`: they issued different collectives at `seq`; `behind`: some have not issued `seq`, for which others wait;
    `missing`: some left no dump, and all others wait; `stuck`: all have issued `seq`, and none has
    finished it.
    """

    what: Literal["differ", "behind", "missing", "stuck"]
    group: str
    seq: int
    calls: dict[int, Call]
    ranks: list[int]
    time_s: float
    sentences: list[str]


def compare(dumps: Sequence[Dump]) -> list[Parting]:
    """The first parting of each process group, the one that explains most first."""
    groups = dict.fromkeys(call.group for dump in dumps for call in dump.calls)
    partings = [parting for group in groups if (parting := _compare_group(group, dumps))]
    order = ["differ", "behind", "missing", "stuck"]
    return sorted(partings, key=lambda parting: (order.index(parting.what), parting.time_s))


def evidence(parting: Parting, dumps: Sequence[Dump]) -> list[Line]:
    """What each rank's dump says of the parting, as lines to quote."""
    lines = []
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        call = parting.calls.get(dump.rank)
        own = [other for other in dump.calls if other.group == parting.group]
        if call:
            text = f"rank {dump.rank}: seq {call.seq} {call}, {call.state}"
        elif own and dump.rank in parting.ranks:
            last = max(own, key=lambda other: other.seq)
            text = f"rank {dump.rank}: last call is seq {last.seq} {last}"
        elif dump.rank in parting.ranks:
            text = f"rank {dump.rank}: no collective in this group"
        else:
            continue
        lines.append(Line(dump.path, 0, text))
    return lines


def _compare_group(group: str, dumps: Sequence[Dump]) -> Parting | None:
    by_rank = {dump.rank: {call.seq: call for call in dump.calls if call.group == group} for dump in dumps}
    expected = frozenset[int]().union(*(dump.members.get(group, frozenset()) for dump in dumps))
    if not expected:  # the dumps do not say who is in the group
        expected = frozenset(rank for rank, calls in by_rank.items() if calls or DEFAULT_GROUP in group)
    present = {rank: calls for rank, calls in by_rank.items() if rank in expected}
    absent = sorted(expected - present.keys())
    start = max(min(calls) for calls in present.values() if calls)
    for seq in sorted({seq for calls in present.values() for seq in calls if seq >= start}):
        calls = {rank: of_rank[seq] for rank, of_rank in present.items() if seq in of_rank}
        without = sorted(present.keys() - calls.keys())
        if len({_signature(call) for call in calls.values()}) > 1:
            return _differ(group, seq, calls)
        if without and calls:
            return _behind(group, seq, calls, without, present, absent)
        if calls and not any(call.is_done for call in calls.values()):
            return _all_wait(group, seq, calls, absent)  # what was queued behind it says nothing
    return None


def _all_wait(group: str, seq: int, calls: dict[int, Call], absent: list[int]) -> Parting:
    call = next(iter(calls.values()))
    where = f"collective {seq} of group {group}, {call}"
    if absent:
        sentence = f"{_left_none(absent)} {waiting(calls)} in {where}."
        return Parting("missing", group, seq, calls, absent, call.time_s, [sentence])
    sentence = f"All of its ranks have issued {where}, and none has finished it."
    return Parting("stuck", group, seq, calls, sorted(calls), call.time_s, [sentence])


def _left_none(ranks: list[int]) -> str:
    return f"{ranks_in_words(ranks).capitalize()} left no dump."


def waiting(ranks: Iterable[int]) -> str:
    """`Rank 0 waits` or `Ranks 0, 2 wait`."""
    words = ranks_in_words(ranks).capitalize()
    return f"{words} wait{'' if words.startswith('Ranks') else 's'}"


def _signature(call: Call) -> tuple[str, str]:
    return call.kind, "" if any(call.kind.startswith(kind) for kind in UNEVEN) else call.moves


def _differ(group: str, seq: int, calls: dict[int, Call]) -> Parting:
    by_call: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(calls):
        by_call.setdefault(_signature(calls[rank]), []).append(rank)
    parts = [f"{ranks_in_words(ranks)} issued {calls[ranks[0]]}" for ranks in by_call.values()]
    sentence = f"At collective {seq} of group {group}, {'; '.join(parts)}."
    fewest = min(by_call.values(), key=len)
    return Parting("differ", group, seq, calls, fewest, min(call.time_s for call in calls.values()), [sentence])


def _behind(
    group: str,
    seq: int,
    calls: dict[int, Call],
    without: list[int],
    present: dict[int, dict[int, Call]],
    absent: list[int],
) -> Parting:
    call = next(iter(calls.values()))
    sentences = [
        f"{waiting(calls)} in collective {seq} of group {group}, {call}; {ranks_in_words(without)} never issued it."
    ]
    for rank in without:
        own = present[rank]
        last = own[max(own)] if own else None
        sentences.append(f"The last that rank {rank} issued is {f'collective {last.seq}, {last}' if last else 'none'}.")
    if absent:
        sentences.append(_left_none(absent))
    return Parting("behind", group, seq, calls, without, call.time_s, sentences)
