"""In which process group a collective ran, and which ranks that is.

A run leaves a mark within each `c10d::` operator: an event of no length named `group ranks 0,2, tp`
(`ddp_lab.runtime.watch.sequence`). Kernels of NCCL name their group themselves.
"""

from bisect import bisect_right
from typing import Any

import pandas as pd

from ddp_lab.collectives import ranks
from ddp_lab.collectives.ranks import NAMED, Ranks

EVERYBODY = "all ranks"
"""The name of the only process group in a trace that names none, and of one of all ranks."""
MARK = "group ranks "


def calls_by_thread(events: pd.DataFrame, prefix: str) -> dict[str, list[Any]]:
    """The host's events whose names begin with `prefix`, in order of start, by process and thread."""
    found = events[events["cat"].isin(("cpu_op", "user_annotation")) & events["name"].str.startswith(prefix)]
    threads: dict[str, list[Any]] = {}
    for call in found[found["name"] != "nccl:coalesced"].itertuples():  # which does not say what it holds
        threads.setdefault(f"{call.pid} {call.tid}", []).append(call)
    return threads


def call_at(threads: dict[str, list[Any]], thread: str, moment: float) -> Any:
    """The call that was under way on a thread; None if there is none."""
    calls = threads.get(thread, [])
    last = bisect_right(calls, moment, key=lambda call: call.start) - 1
    return calls[last] if last >= 0 and calls[last].end >= moment else None


def marked_groups(events: pd.DataFrame, world_size: int) -> dict[int, str]:
    """The name of the group of each `c10d::` operator that has a mark, by the operator's label in `events`."""
    marks = events[events["name"].str.startswith(MARK)]
    threads = calls_by_thread(events, "c10d::") if len(marks) else {}
    found = {}
    for mark in list[Any](marks.itertuples()):
        if call := call_at(threads, f"{mark.pid} {mark.tid}", mark.start):
            found[call.Index] = shown(str(mark.name).removeprefix("group "), world_size)
    return found


def shown(name: str, world_size: int) -> str:
    """A group's name as tables show it: `EVERYBODY` in the place of all ranks."""
    whole = NAMED.fullmatch(name)
    return EVERYBODY + whole["rest"] if whole and len(ranks_of(name, world_size)) == world_size else name


def ranks_of(name: str, world_size: int) -> Ranks:
    """The ranks of a group with this name; empty if it does not say."""
    return Ranks(range(world_size)) if name.startswith(EVERYBODY) else ranks.ranks_of(name)
