"""What NCCL says of itself as JSON: answers of RAS, and the times of the Inspector."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from ddp_lab.doctor.facts import Facts, Match
from ddp_lab.doctor.reading import nccl_json
from ddp_lab.doctor.reading.texts import Line, printable

FEWEST, MOSTLY, LONGER = 10, 0.8, 1.5
"""The fewest collectives that all ranks have timed; the share of them in which one rank is the shortest; and how many
times longer the others are. All ranks leave an all-reduce together, so the shortest one came last."""


def ras_process_gone(facts: Facts) -> Match | None:
    return _of_ras(facts, nccl_json.gone)


def ras_counts_differ(facts: Facts) -> Match | None:
    return _of_ras(facts, nccl_json.unequal)


def _of_ras(facts: Facts, lines_of: Callable[[nccl_json.RasAnswer], Iterator[Line]]) -> Match | None:
    lines = [line for answer in facts.answers for line in lines_of(answer)]
    return Match(lines) if lines else None


def inspector_straggler(facts: Facts) -> Match | None:
    """One rank spends much less time in most collectives of a communicator than the others."""
    calls: dict[str, dict[tuple[str, int], dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    paths = {}
    for call in facts.timed:
        calls[call.communicator][call.kind, call.number][call.rank] = call.us
        paths[call.communicator, call.rank] = call.path
    for communicator, of_group in calls.items():
        ranks = {rank for times in of_group.values() for rank in times}
        collectives = [times for times in of_group.values() if len(times) == len(ranks) > 1]
        if len(collectives) < FEWEST:
            continue
        shortest = Counter(min(times, key=lambda rank: times[rank]) for times in collectives)
        rank, count = shortest.most_common(1)[0]
        median = statistics.median(times[rank] for times in collectives)
        others_median = statistics.median(
            statistics.median(us for r, us in times.items() if r != rank) for times in collectives
        )
        if count >= MOSTLY * len(collectives) and others_median >= LONGER * median:
            sentence = f"rank {rank}: median {median:,.0f} us in {len(collectives)} collectives of communicator "
            sentence += f"{printable(communicator)}; the others {others_median:,.0f} us"
            detail = f"Rank {rank} is the shortest in {count} of {len(collectives)}: it comes last, and the others wait"
            return Match(
                [Line(paths[communicator, rank], 0, sentence)],
                [f"{detail} for it {others_median - median:,.0f} us in the middle one."],
            )
    return None
