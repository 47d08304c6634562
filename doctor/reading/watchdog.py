"""What torch's NCCL watchdog prints when a collective runs out of time, from torch 1.9 to 2.15.

`[rank5]` at the begin of a line (2.2 and later) is the rank in the job; `[Rank 5]` is the rank in the group of the
collective. A second line of the same rank, with the same number, names the group (2.3 and later). The wordings are from
ProcessGroupNCCL.cpp and nccl2 in torch/csrc/distributed/c10d of https://github.com/pytorch/pytorch.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from doctor.reading.texts import Line, Text

_JOB_RANK = re.compile(r"\[rank(\d{1,6})\]")
_TIMEOUT = re.compile(
    r"(?:Rank (\d{1,6})\] ?)?Watchdog caught collective operation timeout: "
    r"WorkNCCL\((?:SeqNum=(\d{1,12}), )?OpType=(\w{1,40})(?:, NumelIn=(\d{1,15}), NumelOut=(\d{1,15}))?"
)
_STATUS = re.compile(
    r"\[PG (?:ID \d{1,9} PG GUID )?([^\]\n]{0,160}?) ?Rank (\d{1,6})\]"
    r"(?:.{0,200}?(?:work sequence id|at NCCL work|at work): (-?\d{1,12}))?"
    r".{0,1000}?[Ll]ast enqueued(?: NCCL)? work: (-?\d{1,12}), last completed(?: NCCL)? work: (-?\d{1,12})"
)
_TORCHCOMMS = re.compile(
    r"\[TC\]\[rank=(\d{1,6})\]\[name=([^\]\n]{0,120})\] "
    r"(?:Operation timed out after (\d{1,12}) ms|Aborting process on rank \d{1,6} due to timeout)"
)
HANG = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for|Heartbeat monitor timed out"
    r"|Received a dump signal due to a collective timeout|\[TC\].{0,140} (?:Operation timed out after|due to timeout)"
    r"|watchdog got stuck for \d"
)
"""Lines that say that a collective ran out of time."""


@dataclass(frozen=True)
class Timeout:
    """A collective that the watchdog gave up.

    Attributes:
        rank: In the job if `in_job`, else in its group; None if the line does not say.
        group: None if no line names it.
        seq: Its number in the group.
    """

    rank: int | None
    in_job: bool
    group: str | None
    seq: int | None
    kind: str
    elements: tuple[str | None, str | None]
    line: Line


@dataclass(frozen=True)
class Status:
    """How far a rank was in a group when it or another rank gave up.

    Attributes:
        timed_out: Number of the collective that ran out of time on this rank; None if none did.
        enqueued: How many it had issued.
    """

    rank: int
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
    """Each once, with the group that the nearest status line of the same rank and number names."""
    found: dict[tuple[object, ...], Timeout] = {}
    for text in texts:
        statuses = list(_statuses(text))
        for index, line in text.find(_TIMEOUT):
            if not (match := _TIMEOUT.search(line.text)):
                continue
            in_job = _JOB_RANK.search(line.text)
            rank = int(in_job[1]) if in_job else int(match[1]) if match[1] else None
            seq = int(match[2]) if match[2] else None
            one = Timeout(rank, bool(in_job), None, seq, match[3], (match[4], match[5]), line)
            near = min(
                (each for each in statuses if each[1].rank == rank and each[1].timed_out == seq is not None),
                key=lambda each: abs(each[0] - index),
                default=None,
            )
            one = replace(one, group=near[1].group) if near else one
            found.setdefault((one.rank, one.group, one.seq, one.kind), one)
    return list(found.values())


def read_statuses(texts: Iterable[Text]) -> list[Status]:
    return [status for text in texts for _, status in _statuses(text)]


def _statuses(text: Text) -> Iterator[tuple[int, Status]]:
    for index, line in text.find(_STATUS):
        if match := _STATUS.search(line.text):
            in_job = _JOB_RANK.search(line.text)
            timed_out = int(match[3]) if match[3] else None
            rank = int(in_job[1] if in_job else match[2])
            yield index, Status(rank, match[1].strip(), timed_out, int(match[4]), line)


def read_gave_up(texts: Iterable[Text]) -> list[GaveUp]:
    found = []
    for line in (line for text in texts for line in text.search(_TORCHCOMMS)):
        if match := _TORCHCOMMS.search(line.text):
            in_job = _JOB_RANK.search(line.text)
            seconds = int(match[3]) / 1e3 if match[3] else None
            found.append(GaveUp(int(in_job[1] if in_job else match[1]), match[2], seconds, line))
    return found
