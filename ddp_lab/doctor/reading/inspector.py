"""The collectives that NCCL's Inspector has timed: a line of JSON for each that a rank has completed.

The layout is that of `plugins/profiler/inspector/inspector_json.cc` of https://github.com/NVIDIA/nccl, v4.0 (in
`ext-profiler/inspector` before NCCL 2.29.7). A process writes `<host>-pid<PID>.log`. It has no collective that has not
ended, nor those under 8 KiB by default.
"""

from typing import Annotated, NamedTuple

import msgspec

from ddp_lab.doctor.reading.flight_recorder import MOST_RANKS


class Header(msgspec.Struct):
    id: str
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]


class Collective(msgspec.Struct):
    """`coll_sn` counts the collectives of a kind in the communicator."""

    coll: str
    coll_sn: int
    coll_msg_size_bytes: int
    coll_exec_time_us: int


class Entry(msgspec.Struct):
    """`metadata` and one of the other two, or it is another file."""

    header: Header
    metadata: msgspec.Raw
    coll_perf: Collective | None = None
    p2p_perf: msgspec.Raw | None = None


class Timed(NamedTuple):
    """A collective on one rank: `us` from the start of its first kernel to the end of its last."""

    path: str
    communicator: str
    rank: int
    kind: str
    number: int
    size_bytes: int
    us: int


def read_inspector(path: str, content: bytes) -> list[Timed] | None:
    """The collectives in a file; None if its first line is not the Inspector's. Lines that are cut off are left out."""
    found: list[Timed] = []
    decoder = msgspec.json.Decoder(Entry)
    for number, line in enumerate(content.splitlines()):
        try:
            entry = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError):
            entry = None
        if number == 0 and (entry is None or (entry.coll_perf is None and entry.p2p_perf is None)):
            return None
        if entry is not None and (one := entry.coll_perf) is not None:
            sizes = one.coll_msg_size_bytes, one.coll_exec_time_us
            found.append(Timed(path, entry.header.id, entry.header.rank, one.coll, one.coll_sn, *sizes))
    return found
