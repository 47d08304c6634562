"""What torch's NCCL watchdog prints when a collective runs out of time, from torch 1.9 to 2.15.

`[rank5]` at the begin of a line (2.2 and later) is the rank in the job; `[Rank 5]` is the rank in the group of the
collective. A second line of the same rank, with the same number, names the group (2.3 and later). The wordings are from
ProcessGroupNCCL.cpp and nccl2 in torch/csrc/distributed/c10d of https://github.com/pytorch/pytorch.
"""

import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from ddp_lab.doctor.reading.texts import JOB_RANK, Line, Text

_BEGINS = re.compile(r"Watchdog caught")
_TIMEOUT = re.compile(
    r"(?:Rank (\d{1,6})\] ?)?Watchdog caught collective operation timeout: "
    r"WorkNCCL\( ?(?:SeqNum=(\d{1,12}),[ .,]{0,8})?OpType=(\w{1,40})(?:, NumelIn=(\d{1,15}), NumelOut=(\d{1,15}))?"
)
_MOST_BROKEN = 4
"""The most lines over which one line of the watchdog may be broken."""
_STATUS = re.compile(r"[Ll]ast enqueued(?: NCCL)? work: (-?\d{1,12}), last completed(?: NCCL)? work: (-?\d{1,12})")
_GROUP = re.compile(r"\[PG (?:ID \d{1,9} PG GUID )?([^\]\n]{0,160}?) ?Rank (\d{1,6})\]")
_AT = re.compile(r"(?:work sequence id|at NCCL work|at work): (-?\d{1,12})")
_RESTART = re.compile(r"restart_count=[1-9]|[Ww]ill restart worker group")
_TORCHCOMMS = re.compile(
    r"\[TC\]\[rank=(\d{1,6})\]\[name=([^\]\n]{0,120})\] "
    r"(?:Operation timed out after (\d{1,12}) ms|Aborting process on rank \d{1,6} due to timeout)"
)
HANG = re.compile(
    r"Watchdog caught collective operation[ \n]{1,9}timeout|Timed out waiting \d+ms for|Heartbeat monitor timed out"
    r"|Received a dump signal due to a collective timeout|\[TC\].{0,140} (?:Operation timed out after|due to timeout)"
    r"|watchdog got stuck for \d"
)
"""Lines that say that a collective ran out of time."""


@dataclass(frozen=True)
class Timeout:
    """A collective that the watchdog gave up.

    Attributes:
        rank: In the job if `in_job`, else in its group; None if the line does not say.
        local: In its group.
        attempt: How often torchrun had restarted the ranks.
        group: None if no line names it.
        seq: Its number in the group.
    """

    rank: int | None
    in_job: bool
    local: int | None
    attempt: int
    group: str | None
    seq: int | None
    kind: str
    elements: tuple[str | None, str | None]
    line: Line


@dataclass(frozen=True)
class Status:
    """How far a rank was in a group when it or another rank gave up.

    Attributes:
        rank, in_job, local, attempt: As of a timeout.
        timed_out: Number of the collective that ran out of time on this rank; None if none did.
        enqueued: How many it had issued.
    """

    rank: int
    in_job: bool
    local: int
    attempt: int
    group: str
    timed_out: int | None
    enqueued: int
    line: Line


@dataclass(frozen=True)
class GaveUp:
    """A collective that ran out of time in torch's `nccl` of 2.15, which does not say which one it was.

    Attributes:
        rank: In the whole job if the line has torch's prefix, else in the group.
        seconds: None in the line that ends the process.
    """

    rank: int
    group: str
    seconds: float | None
    line: Line


def read_timeouts(texts: Iterable[Text]) -> list[Timeout]:
    """Each timeout once, with the group that the nearest status line of the same rank and number names."""
    timeouts: dict[tuple[object, ...], Timeout] = {}
    for text in texts:
        restarts = [index for index, _ in text.find(_RESTART)]
        statuses = defaultdict[tuple[int, int | None], list[tuple[int, Status]]](list)
        for place, status in statuses_in(text):
            statuses[status.rank, status.timed_out].append((place, status))
        for index, line in text.find(_BEGINS):
            broken = " ".join(part.text.strip() for part in text.lines[index : index + _MOST_BROKEN])
            if not (match := _TIMEOUT.search(line.text) or _TIMEOUT.search(broken)):
                continue
            job, local = _job_rank(match), int(match[1]) if match[1] else None
            rank = local if job is None else job
            seq = int(match[2]) if match[2] else None
            attempt, elements = bisect(restarts, index), (match[4], match[5])
            kind = _kind(match[3], *(int(count or 0) for count in elements))
            timeout = Timeout(rank, job is not None, local, attempt, None, seq, kind, elements, line)
            alike = statuses.get((rank, seq), []) if rank is not None and seq is not None else []
            after = bisect(alike, index, key=itemgetter(0))
            near = min(alike[max(0, after - 1) : after + 1], key=lambda item: abs(item[0] - index), default=None)
            timeout = replace(timeout, group=near[1].group) if near else timeout
            timeouts.setdefault((timeout.rank, timeout.attempt, timeout.group, timeout.seq, timeout.kind), timeout)
    return list(timeouts.values())


def _kind(name: str, sent: int, received: int) -> str:
    """The kind of coalesced collectives, if their elements show it."""
    if (
        name == "COALESCED"
        and min(sent, received)
        and sent != received
        and max(sent, received) % min(sent, received) == 0
    ):
        return f"COALESCED ({'all-gather' if received > sent else 'reduce-scatter'})"
    return name


def statuses_in(text: Text) -> Iterator[tuple[int, Status]]:
    """Each with the index of its line."""
    restarts = [index for index, _ in text.find(_RESTART)]
    for index, line in text.find(_STATUS):
        match = _STATUS.search(line.text)
        if not match or not (groups := list(_GROUP.finditer(line.text, 0, match.start()))):
            continue
        group, job, at = groups[-1], _job_rank(match), list(_AT.finditer(line.text, 0, match.start()))
        rank, timed_out = int(group[2]) if job is None else job, int(at[-1][1]) if at else None
        attempt = bisect(restarts, index)
        yield (
            index,
            Status(rank, job is not None, int(group[2]), attempt, group[1].strip(), timed_out, int(match[1]), line),
        )


def _job_rank(match: re.Match[str]) -> int | None:
    """The last `[rankN]` before a match: lines of several ranks may be mixed."""
    ranks = JOB_RANK.findall(match.string, 0, match.end())
    return int(ranks[-1]) if ranks else None


def read_gave_up(texts: Iterable[Text]) -> list[GaveUp]:
    given_up = []
    for line in (line for text in texts for line in text.search(_TORCHCOMMS)):
        if match := _TORCHCOMMS.search(line.text):
            job, seconds = _job_rank(match), int(match[3]) / 1e3 if match[3] else None
            given_up.append(GaveUp(int(match[1]) if job is None else job, match[2], seconds, line))
    return given_up
