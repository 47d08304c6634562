"""What NCCL writes as JSON: answers of its RAS, and the collectives that its Inspector has timed.

RAS (`ncclras -f json`, NCCL 2.28.7 and newer): the layout is that of `rasDumpCommsToJSON` in
`src/ras/client_support.cc` of https://github.com/NVIDIA/nccl (read at 2.30.7). The same answer as text is read by
patterns of rules.

Inspector: a line for each collective that a rank has completed. The layout is that of
`plugins/profiler/inspector/inspector_json.cc`, v4.0 (in `ext-profiler/inspector` before NCCL 2.29.7). A process writes
`<host>-pid<PID>.log`. It has no collective that has not ended, nor those under 8 KiB by default.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec

from ddp_lab.collectives.ranks import MOST_RANKS
from ddp_lab.doctor.reading.texts import Line, count_of, printable
from ddp_lab.runtime.errors import UserError

Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]


class Missing(msgspec.Struct):
    """`unresponsive`: its process did not answer. Otherwise it answered, but has the communicator no longer or not yet.
    `considered_dead`: it did not answer for so long that RAS no longer asks."""

    unresponsive: bool
    considered_dead: bool


class MissingRank(msgspec.Struct):
    rank: Rank
    host: str
    pid: int
    cuda_dev: int
    status: Missing

    def __str__(self) -> str:
        verdict = "considered dead" if self.status.considered_dead else "no answer"
        return f"rank {self.rank}, process {self.pid} on {printable(self.host)}, GPU {self.cuda_dev}: {verdict}"


class AnsweringRank(msgspec.Struct):
    rank: Rank
    collective_counts: dict[str, int]


class Communicator(msgspec.Struct):
    hash: str
    size: int
    ranks: list[AnsweringRank]
    missing_ranks: list[MissingRank]


class RasAnswer(msgspec.Struct):
    """`path` is that of the file."""

    nccl_version: str
    communicators: list[Communicator]
    path: str = ""


def is_answer(content: Any) -> bool:
    """Whether decoded JSON looks like an answer of RAS."""
    return isinstance(content, dict) and {"nccl_version", "communicators"} <= content.keys()


def read_answer(path: str, content: Any) -> RasAnswer:
    """
    Raises:
        UserError: fields are missing or of another type.
    """
    try:
        answer = msgspec.convert(content, RasAnswer)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: not an answer of ncclras in a layout that is known: {error}") from None
    answer.path = path
    return answer


def gone(answer: RasAnswer) -> Iterator[Line]:
    """A line for each rank that does not answer."""
    for group in answer.communicators:
        for member in group.missing_ranks:
            if member.status.unresponsive or member.status.considered_dead:
                yield Line(answer.path, 0, f"communicator {printable(group.hash)}: {member}")


def unequal(answer: RasAnswer) -> Iterator[Line]:
    """A line for each kind of collective of which the ranks of a communicator have launched different numbers."""
    for group in answer.communicators:
        for kind in dict.fromkeys(name for member in group.ranks for name in member.collective_counts):
            numbers = {member.rank: member.collective_counts.get(kind, 0) for member in group.ranks}
            ranks_at = Counter(numbers.values())
            if len(ranks_at) > 1:
                least = min(ranks_at)
                behind = [rank for rank, number in sorted(numbers.items()) if number == least]
                subject = f"rank {behind[0]}" if len(behind) == 1 else count_of(len(behind), "rank")
                maximum = f"the others up to {max(ranks_at):,}"
                sentence = f"{subject} has launched {least:,} {printable(kind)}, {maximum}".replace(
                    "ranks has", "ranks have"
                )
                yield Line(answer.path, 0, f"communicator {printable(group.hash)} of {group.size}: {sentence}")


class Header(msgspec.Struct):
    id: str
    rank: Rank


class CollectivePerformance(msgspec.Struct):
    """`coll_sn` counts the collectives of a kind in the communicator."""

    coll: str
    coll_sn: int
    coll_exec_time_us: int


class InspectorEntry(msgspec.Struct):
    """A line of the Inspector has `metadata` and one of the other two."""

    header: Header
    metadata: msgspec.Raw
    coll_perf: CollectivePerformance | None = None
    p2p_perf: msgspec.Raw | None = None


class Timed(NamedTuple):
    """A collective on one rank: `us` from the start of its first kernel to the end of its last."""

    path: str
    communicator: str
    rank: int
    kind: str
    number: int
    us: int


def read_inspector(path: str, content: bytes) -> list[Timed] | None:
    """The collectives in a file; None if its first line is not the Inspector's. Lines that are cut off are left out."""
    timings: list[Timed] = []
    decoder = msgspec.json.Decoder(InspectorEntry)
    for number, line in enumerate(content.splitlines()):
        try:
            entry = decoder.decode(line)
        except (ValueError, RecursionError):  # of JSON, and of UTF-8
            entry = None
        if number == 0 and (entry is None or (entry.coll_perf is None and entry.p2p_perf is None)):
            return None
        if entry is not None and (collective := entry.coll_perf) is not None:
            header = entry.header
            timings.append(
                Timed(path, header.id, header.rank, collective.coll, collective.coll_sn, collective.coll_exec_time_us)
            )
    return timings
