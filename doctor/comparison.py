"""Flight-recorder dumps held against each other: the first collective at which ranks part, and who is behind.

As torch's own analyzer (torch.distributed.flight_recorder), collectives of one process group are matched by sequence
number, and kinds whose sizes may rightly differ between ranks are compared by kind only. Rings hold the last entries
of each rank, so comparison begins where every rank's ring does.
"""

from collections.abc import Sequence
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
    `missing`: some left no dump, and all others wait; `stuck`: all have issued `seq`, and none has finished it.
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
            state = "completed" if call.is_done else "issued, not completed"
            text = f"rank {dump.rank}: seq {call.seq} {call}, {state}"
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
    end = max(max(calls) for calls in present.values() if calls)
    for seq in range(start, end + 1):
        calls = {rank: of_rank[seq] for rank, of_rank in present.items() if seq in of_rank}
        if len({_signature(call) for call in calls.values()}) > 1:
            return _differ(group, seq, calls)
        without = sorted(rank for rank, of_rank in present.items() if seq not in of_rank)
        if without and calls:
            return _behind(group, seq, calls, without, present, absent)
    calls = {rank: of_rank[end] for rank, of_rank in present.items() if end in of_rank}
    if not calls or all(call.is_done for call in calls.values()):
        return None
    waiting = [rank for rank, call in calls.items() if not call.is_done]
    call = calls[waiting[0]]
    where = f"collective {end} of group {group}, {call}"
    if absent:
        sentence = f"{ranks_in_words(absent)} left no dump; {ranks_in_words(waiting)} wait in {where}."
        return Parting("missing", group, end, calls, absent, call.time_s, [sentence])
    sentence = f"All ranks have issued {where}; {ranks_in_words(waiting)} have not finished it."
    return Parting("stuck", group, end, calls, waiting, call.time_s, [sentence])


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
        f"{ranks_in_words(calls)} wait in collective {seq} of group {group}, {call}; "
        f"{ranks_in_words(without)} never issued it."
    ]
    for rank in without:
        own = present[rank]
        last = own[max(own)] if own else None
        sentences.append(f"The last that rank {rank} issued is {f'collective {last.seq}, {last}' if last else 'none'}.")
    if absent:
        sentences.append(f"{ranks_in_words(absent)} left no dump.")
    return Parting("behind", group, seq, calls, without, call.time_s, sentences)
