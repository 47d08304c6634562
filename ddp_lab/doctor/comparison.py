"""Flight-recorder dumps of several ranks compared: the first collective at which they diverge, and who is behind.

As in torch's own analyzer (torch.distributed.flight_recorder), collectives of one process group are matched by sequence
number. Collectives whose sizes may differ between ranks are compared by kind only. A dump holds the last entries of its
rank, so the comparison begins where every rank's dump does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_lab.collectives.calls import Call, differ, ranks_by_call, slow_devices
from ddp_lab.collectives.ranks import ranks_in_words
from ddp_lab.doctor.reading.flight_recorder import DONE, Dump
from ddp_lab.doctor.reading.texts import Line

DEFAULT_GROUP = "default_pg"
"""torch's name of the group of all ranks."""
KINDS = ("differ", "behind", "missing", "stuck")


@dataclass(frozen=True)
class Divergence:
    """Where the ranks of one group diverge.

    `differ`: they issued different collectives as number `seq`. `behind`: some ranks have not issued `seq`, and others
    wait in it. `missing`: some ranks left no dump, and all others wait. `stuck`: all have issued `seq`, and none has
    finished it.
    """

    kind: Literal["differ", "behind", "missing", "stuck"]
    group: str
    seq: int
    calls: dict[int, Call]
    ranks: list[int]
    time_s: float
    sentences: list[str]


def compare(dumps: Sequence[Dump]) -> list[Divergence]:
    """The first divergence of each process group, the one that explains most first.

    Groups of different ranks are different, even if they have one name.
    """
    groups = dict.fromkeys((group, dump.members.get(group)) for dump in dumps for group in dump.by_group)
    divergences = [
        divergence for group, members in groups if (divergence := _compare_group(group, members or None, dumps))
    ]
    return sorted(divergences, key=lambda divergence: (KINDS.index(divergence.kind), divergence.time_s))


def evidence(divergence: Divergence, dumps: Sequence[Dump]) -> list[Line]:
    """Lines to quote: the call of each rank's dump at the divergence."""
    lines = []
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        call = divergence.calls.get(dump.rank)
        calls_here = list(dump.by_group.get(divergence.group, {}).values())
        if call:
            text = f"rank {dump.rank}: seq {call.seq} {call.signature}, {call.state}"
        elif calls_here and dump.rank in divergence.ranks:
            last = max(calls_here, key=lambda collective: collective.seq)
            text = f"rank {dump.rank}: last call is seq {last.seq} {last.signature}"
        elif dump.rank in divergence.ranks:
            text = f"rank {dump.rank}: no collective in this group"
        else:
            continue
        lines.append(Line(dump.path, 0, text))
    return lines


def _compare_group(group: str, members: frozenset[int] | None, dumps: Sequence[Dump]) -> Divergence | None:
    """`members`: None if the dumps do not say who is in the group."""
    by_rank = {
        dump.rank: dump.by_group.get(group, {})
        for dump in dumps
        if not (members and dump.members.get(group)) or dump.members[group] == members
    }
    expected = members or frozenset(rank for rank, calls in by_rank.items() if calls or DEFAULT_GROUP in group)
    present = {rank: calls for rank, calls in by_rank.items() if rank in expected}
    absent = sorted(expected - present.keys())
    start = max((min(calls) for calls in present.values() if calls), default=0)
    for seq in sorted({seq for calls in present.values() for seq in calls if seq >= start}):
        calls = {rank: of_rank[seq] for rank, of_rank in present.items() if seq in of_rank}
        without = sorted(present.keys() - calls.keys())
        if differ(calls.values()):
            return _differ(group, seq, calls)
        if not without and any(call.state in DONE for call in calls.values()):
            continue
        call = next(iter(calls.values()))
        where = f"collective {seq} of group {group}, {call.signature}"
        left_none = [f"{ranks_in_words(absent).capitalize()} left no dump."] if absent else []
        if without:
            lasts = [_last(rank, present[rank]) for rank in without]
            waits = f"{waiting(calls)} in {where}; {ranks_in_words(without)} never issued it."
            return Divergence("behind", group, seq, calls, without, call.time_s, [waits, *lasts, *left_none])
        if absent:  # the queue behind this call says nothing
            sentence = f"{left_none[0]} {waiting(calls)} in {where}."
            return Divergence("missing", group, seq, calls, absent, call.time_s, [sentence])
        sentences = [f"All of its ranks have issued {where}, and none has finished it."]
        if not_there := slow_devices(calls):
            sentences.append(f"The device of {ranks_in_words(not_there)} has not come to it: look there first.")
        return Divergence("stuck", group, seq, calls, sorted(calls), call.time_s, sentences)
    return None


def _differ(group: str, seq: int, calls: dict[int, Call]) -> Divergence:
    by_call = ranks_by_call(calls)
    parts = (f"{ranks_in_words(ranks)} issued {signature}" for signature, ranks in by_call.items())
    sentence = f"At collective {seq} of group {group}, {'; '.join(parts)}."
    fewest, time_s = min(by_call.values(), key=len), min(call.time_s for call in calls.values())
    return Divergence("differ", group, seq, calls, fewest, time_s, [sentence])


def _last(rank: int, calls: dict[int, Call]) -> str:
    last = calls[max(calls)] if calls else None
    return f"The last that rank {rank} issued is {f'collective {last.seq}, {last.signature}' if last else 'none'}."


def waiting(ranks: Iterable[int]) -> str:
    """`Rank 0 waits` or `Ranks 0, 2 wait`."""
    words = ranks_in_words(ranks).capitalize()
    return f"{words} wait{'' if words.startswith('Ranks') else 's'}"
