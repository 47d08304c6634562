"""The recent collectives of each rank, as JSON from torch's flight recorder or from this project.

torch (2.5 to 2.15; `torch._C._distributed_c10d._dump_nccl_trace_json()`, for Gloo `_dump_fr_trace_json()`) writes
`entries` with a sequence number in their process group. Its pickles are never loaded, since a pickle can run code. This
project writes `<anything>rank_<R>.flight.json` when a run hangs; its layout is `FlightRecord`.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from ddp_lab.collectives.calls import COMPLETED, Call
from ddp_lab.collectives.kinds import ENDS
from ddp_lab.collectives.ranks import ranks_of
from ddp_lab.record_format import FLIGHT_VERSION, FlightRecord
from ddp_lab.runtime.errors import UserError

_RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})|(\d{1,6})(?:\.flight)?(?:\.json)?$")


UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "all_gather_v", "reduce_scatter_v", "coalesced", "barrier")
"""torch's names of collectives that may move different sizes on different ranks: sizes say nothing there."""

ENDED = "ended or given up"
"""For Gloo, torch's dump does not say which."""
DONE = (COMPLETED, ENDED)


class TorchEntry(msgspec.Struct):
    """The fields that are used in an entry of torch's dump, `version` 2.x."""

    collective_seq_id: int
    process_group: list[str]
    profiling_name: str
    state: str
    is_p2p: bool = False
    retired: bool = False
    time_created_ns: int = 0
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []


class TorchGroup(msgspec.Struct):
    ranks: str = ""


class TorchDump(msgspec.Struct):
    version: str
    entries: list[TorchEntry] = []
    pg_config: dict[str, TorchGroup] = {}
    rank: int | None = None


@dataclass(frozen=True)
class Dump:
    """The dump of one rank. `members`: the ranks of each group, as far as the dump says. `is_own`: of this project."""

    path: str
    rank: int
    calls: list[Call]
    members: dict[str, frozenset[int]]
    point_to_point: int = 0
    is_own: bool = False

    @cached_property
    def by_group(self) -> dict[str, dict[int, Call]]:
        """Calls by their group and number."""
        by_group: dict[str, dict[int, Call]] = defaultdict(dict)
        for call in self.calls:
            by_group[call.group][call.seq] = call
        return by_group


def is_dump(content: Any) -> bool:
    """Whether decoded JSON looks like a dump of either layout."""
    return isinstance(content, dict) and "version" in content and ("entries" in content or "pg_config" in content)


def read_dump(path: str, content: Any) -> Dump:
    """A dump from decoded JSON.

    Raises:
        UserError: fields are missing or of another type, or the rank is neither in the file nor in its name.
    """
    try:
        if "pg_config" in content or not isinstance(content.get("version"), int):
            return _from_torch(path, msgspec.convert(content, TorchDump))
        return _from_own(path, msgspec.convert(content, FlightRecord))
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: not a flight-recorder dump of a layout that is known: {error}") from None


def _from_own(path: str, dump: FlightRecord) -> Dump:
    if dump.version != FLIGHT_VERSION:
        kinds = f"version {dump.version} of the flight recorder's layout; this doctor reads version {FLIGHT_VERSION}"
        raise UserError(f"{path}: {kinds}")
    calls = [call for call in dump.entries if call.kind not in ENDS]
    members = {call.group: _members_of(call.group, dump.world_size) for call in dump.entries}
    return Dump(path, dump.rank, calls, members, len(dump.entries) - len(calls), is_own=True)


def _from_torch(path: str, dump: TorchDump) -> Dump:
    name = _RANK_IN_NAME.findall(path.rsplit("/", 1)[-1])
    rank = dump.rank if dump.rank is not None else int(name[-1][0] or name[-1][1]) if name else None
    if rank is None:
        raise UserError(f"{path}: torch's dump does not say its rank; put it into the file's name: rank_0.json")
    calls, members = [], {}
    for entry in dump.entries:
        group = entry.process_group[0] if entry.process_group else ""
        config = dump.pg_config.get(group, TorchGroup())  # Gloo's (2.15) has one entry, "", of the last group made
        description = entry.process_group[-1] if len(entry.process_group) > 1 else group
        label = f"{group} ({description})" if description not in ("", "undefined", group) else group
        members[label] = frozenset(ranks_of(f"ranks {config.ranks.strip('[]')}"))
        if entry.is_p2p:
            continue
        sizes = " and ".join("x".join(map(str, size)) or "1" for size in entry.input_sizes[:3])
        kind, dtype = entry.profiling_name.rpartition(":")[2], ", ".join(dict.fromkeys(entry.input_dtypes))
        if kind.startswith(UNEVEN):
            sizes = dtype = ""
        state = ENDED if entry.retired and entry.state != COMPLETED else entry.state
        seq, time_s = entry.collective_seq_id, entry.time_created_ns / 1e9
        calls.append(Call(seq, kind, sizes, dtype, label, state=state, time_s=time_s))
    point_to_point = sum(entry.is_p2p for entry in dump.entries)
    return Dump(path, rank, calls, members, point_to_point=point_to_point)


def _members_of(group: str, world_size: int) -> frozenset[int]:
    """The ranks of a group in this project's record; empty if its name does not list them."""
    if group.startswith(f"{world_size} ranks"):
        return frozenset(range(world_size))
    return frozenset(ranks_of(group))
