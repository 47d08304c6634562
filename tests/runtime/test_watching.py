"""What ranks know of each other: records that outlive their process, the order of collectives, and the first cause."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.collectives.calls import Call, first_difference
from ddp_lab.collectives.ranks import LONGEST_NAME, Ranks, group_name, ranks_of
from ddp_lab.runtime.errors import SequenceError
from ddp_lab.runtime.groups import gather_objects
from ddp_lab.runtime.watch.cause import RankReport, find_mismatch, first_cause
from ddp_lab.runtime.watch.flight_recorder import ExitReason, FlightRecorder, RankState, kind_of
from ddp_lab.runtime.watch.sequence import recorded_collectives
from ddp_lab.strategy.gradient_watch import GradientWatch, agree_on_sequence, digest, follow_gradients
from tests.ranks import RankPool
from tests.tables import each_row

# The flight recorder -------------------------------------------------------------------------------------------------

IN_STEP_7 = """
import signal
from ddp_lab.runtime.watch.flight_recorder import FlightRecorder

flight = FlightRecorder.create(rank=3)
flight.set_phase(7, "backward")
flight.set_state(flight.add(1, "all_reduce", 10, "float32", "ranks 0,1", -1, 2), "completed")
flight.page.waiting = flight.add(2, "broadcast", 4, "int64", "ranks 0,1", 0, 0)
print(flight.path, flush=True)
signal.pause()
"""


def test_a_flight_recorder_outlives_its_process():
    process = subprocess.Popen([sys.executable, "-c", IN_STEP_7], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        flight = FlightRecorder.open(Path(process.stdout.readline().strip()))
        assert not flight.owner_is_gone()
    finally:
        process.kill()
    process.wait(timeout=60)
    assert flight.owner_is_gone() and flight.exit_reason is None and not flight.page.is_finished
    state = flight.state()
    assert str(state) == "in step 7 during backward, in broadcast #2 of 4 int64" and state.rank == 3
    assert [entry.state for entry in state.entries] == ["completed", "issued"]
    report = RankReport(state, ExitReason("failed", "it broke", 1.0))
    assert msgspec.json.decode(msgspec.json.encode(report), type=RankReport) == report


def test_a_ring_keeps_the_latest():
    flight = FlightRecorder.create(rank=0)
    for seq in range(1, 5001):
        flight.add(seq, "all_reduce", seq, "float32", "ranks 0,1", -1, 0)
    assert [entry.seq for entry in flight.state().entries] == list(range(5000 - 2047, 5001))
    flight.set_exit_reason(ExitReason.now("failed", "x" * 100_000, "y" * 100_000))
    reason = flight.exit_reason
    assert reason and reason.traceback and reason.text == "x" * 2000, "cut, but there"
    flight.close()


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


@each_row(
    "error, text", [(ValueError("a\udcff"), r"ValueError: a\udcff"), (Mute(), "Mute: (its text cannot be read: ")]
)
def test_a_flight_recorder_takes_any_exception(error, text):
    flight = FlightRecorder.create(rank=0)
    flight.set_exit_reason(ExitReason.of(error, in_collective=False))
    assert flight.exit_reason is not None and flight.exit_reason.text.startswith(text)
    flight.close()


# The order of collectives --------------------------------------------------------------------------------------------


def exchange(order: str) -> str | None:
    """All-reduce two gradients of equal size; on rank 1 in another order, or as copies, as `order` says."""
    parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    flight = FlightRecorder.create(dist.get_rank())
    with recorded_collectives(flight):
        follow_gradients(GradientWatch({str(index): p for index, p in enumerate(parameters)}))
        sum((parameter * 2).sum() for parameter in parameters).backward()
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        if dist.get_rank() == 1 and order == "swapped":
            gradients.reverse()
        if dist.get_rank() == 1 and order == "unknown":  # of a copy, nobody can tell whose gradient it is
            gradients = [gradient.clone() for gradient in gradients]
        for gradient in gradients:
            dist.all_reduce(gradient)
        pairs: list[Any] = [dist.new_group([0, 1]), dist.split_group(split_ranks=[[0, 1]])]  # made later: recorded too
        for pair in pairs:
            work = dist.broadcast(torch.zeros(3), src=0, group=pair, async_op=True)
            assert work is not None
            work.wait()
        before = gather_objects(digest(dist.group.WORLD))
        problem = agree_on_sequence(dist.group.WORLD) if before[0] != before[1] else None
        after = gather_objects(digest(dist.group.WORLD))
        entries = flight.state().entries
    flight.close()
    for pair in pairs:
        dist.destroy_process_group(pair)
    assert [entry.kind for entry in entries[:2]] == ["all_reduce"] * 2
    broadcasts = [entry for entry in entries if entry.kind == "broadcast" and entry.elements == 3]
    recorded = [(entry.state, entry.group.partition(":")[0], entry.seq) for entry in broadcasts]
    assert recorded == [("completed", f"ranks 0,1{suffix}", 1) for suffix in (" (2)", ", default_pg")]
    assert problem is not None or after[0] == after[1], "digests start again from 0 after a comparison"
    assert problem is None or isinstance(problem, SequenceError)
    return str(problem) if problem else None


@each_row("order", ["same", "swapped", "unknown"])
def test_the_order_of_equal_gradients(ranks: RankPool, order):
    first, second = ranks.run(2, exchange, order)
    assert first == second
    if order != "swapped":
        assert first is None
        return
    assert "#1 differs between ranks: rank 0 all_reduce of 8 float32 (gradient of trainable parameter 0); " in first
    assert "rank 1 all_reduce of 8 float32 (gradient of trainable parameter 1)" in first


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=40, unique=True), st.integers(4001, 4003))
def test_groups_of_other_ranks_have_other_names(ranks, extra):
    name = group_name(Ranks(sorted(ranks)))
    assert len(name) <= LONGEST_NAME and name != group_name(Ranks(sorted({*ranks, extra})))
    assert name[0] != "r" or ranks_of(name) == ranks_of(f"{name} (2)") == tuple(sorted(ranks))
    named = {"ranks 0,1": (0, 1), "ranks 0-15": range(16), "ranks 3": (3,), "ranks 0-2,5,7": (0, 1, 2, 5, 7)}
    assert [group_name(Ranks(members)) for members in named.values()] == list(named)


def entry(seq: int, kind: str = "all_reduce", elements: int = 10, dtype: str = "float32", **changes) -> Call:
    values = {"group": "ranks 0-3", "root": -1, "parameter": 0, "state": "completed", "time_s": float(seq)}
    return Call(**{"seq": seq, "kind": kind, "elements": elements, "dtype": dtype, **values, **changes})


@each_row(
    "changes, differs",
    [
        ({}, False),
        ({"state": "issued", "time_s": 9.0}, False),
        ({"kind": "broadcast", "root": 0}, True),
        ({"elements": 11}, True),
        ({"dtype": "float64"}, True),
        ({"parameter": 5}, False),  # the parameter of the first is not known
        ({"group": "ranks 1,2", "elements": 11}, False),
    ],
)
def test_where_sequences_differ(changes, differs):
    entry_a, entry_b = entry(2), entry(2, **changes)
    differing = first_difference({0: [entry(1), entry_a, entry(3)], 1: [entry(1), entry_b]})
    assert differing == ({0: entry_a, 1: entry_b} if differs else {})
    for kinds, sizes in ((("send", "recv"), (10, 10)), (("all_to_all",) * 2, (3, 5))):
        pair = [entry(2, kind, elements) for kind, elements in zip(kinds, sizes, strict=True)]
        assert first_difference({rank: [entry(1), call] for rank, call in enumerate(pair)}) == {}


# The cause -----------------------------------------------------------------------------------------------------------


def state(rank: int, *entries: Call, waits: bool = False, phase: str = "backward", progress_s: float = 1) -> RankState:
    return RankState(rank, 7, phase, entries, entries[-1] if waits else None, progress_s)


OF_TP = entry(1, group="ranks 2,3", state="started")
BY_WATCHDOG = (
    'Fatal Python error: Aborted\n\nThread 0x7f (most recent call first):\n  File "loop.py", line 9 in train\n'
)
BY_ITSELF = BY_WATCHDOG.replace("Thread", "Current thread")


def ended(state: RankState, kind: str, text: str = "it broke", time_s: float = 1.0) -> RankReport:
    return RankReport(state, ExitReason(kind, text, time_s, "trace"))


def gone(state: RankState, crash: str = "") -> RankReport:
    return RankReport(state, None, is_gone=True, crash=crash)


first_call, second_call, larger_call = entry(1), entry(2), entry(2, elements=11)
CASES = {
    "a killed rank comes before its victims": (
        [
            ended(state(0, first_call, waits=True), "connection", "Connection closed by peer"),
            gone(state(1, first_call)),
            ended(state(2, first_call), "signal", "SIGTERM"),
        ],
        ("killed", 1),
        "rank 1 was killed (SIGKILL, or it exited without an error) in step 7 during backward, after all_reduce #1",
    ),
    "of several killed ranks the first is named, even if others failed": (
        [ended(state(0), "failed", "OSError: no peer"), gone(state(1, progress_s=2)), gone(state(2))],
        ("killed", 2),
        "ranks 1, 2; first rank 2 was killed",
    ),
    "the first failure comes before later ones": (
        [
            ended(state(0), "failed", "KeyError: 2", 5.0),
            ended(state(1), "failed", "ValueError: 1", 4.0),
            ended(state(2), "noticed", time_s=4.1),
        ],
        ("failed", 1),
        "rank 1 failed in step 7 during backward: ValueError: 1",
    ),
    "a crash in collectives that differ is a mismatch": (  # Gloo ends a process with SIGABRT if sizes differ
        [
            ended(state(0, first_call, second_call), "signal", "SIGTERM"),
            gone(state(1, first_call, larger_call), "Fatal Python error: Aborted"),
        ],
        ("mismatched", 0),
        "collective #2 differs between ranks",
    ),
    "ranks that are told to stop in different places do not differ": (
        [
            ended(state(0, first_call, second_call), "signal", "SIGTERM"),
            ended(state(1, first_call, larger_call), "signal", "SIGTERM"),
        ],
        ("interrupted", 0),
        "stopped by SIGTERM",
    ),
    "one rank is told to stop": (
        [ended(state(0), "noticed"), ended(state(1), "signal", "SIGINT")],
        ("interrupted", 1),
        "rank 1 was stopped by SIGINT",
    ),
    "the rank that does not come is named": (
        [
            ended(state(0, first_call, second_call, waits=True), "timeout"),
            ended(state(1, first_call, phase="forward"), "noticed"),
            ended(state(2, first_call, second_call, waits=True), "noticed"),
        ],
        ("hung", 1),
        "rank 1 hangs in step 7 during forward",
    ),
    "of those that do not come, the one that is behind is named": (
        [
            ended(state(0, first_call, second_call), "noticed"),  # it has passed that collective
            ended(state(1, first_call, second_call, waits=True), "timeout"),
            ended(state(2, first_call), "noticed"),
        ],
        ("hung", 2),
        "rank 2 hangs in step 7",
    ),
    "NCCL aborted who waits for a rank that waits itself, in another group": (
        [ended(state(0), "noticed"), ended(state(1), "noticed")]
        + [ended(state(2, entry(2, group="ranks 0,2"), waits=True), "noticed")]
        + [gone(state(3, OF_TP, waits=True), BY_WATCHDOG)],
        ("hung", 0),
        "rank 0 hangs in step 7 during backward",
    ),
    "a rank that aborts by itself while its device waits has crashed": (
        [ended(state(rank, OF_TP, waits=True), "noticed") for rank in (0, 1, 2)]
        + [gone(state(3, OF_TP, waits=True), BY_ITSELF)],
        ("killed", 3),
        "rank 3 crashed (Aborted) in step 7 during backward, in all_reduce #1",
    ),
    "a node cannot be reached": (
        [ended(state(0, first_call, waits=True), "connection"), RankReport()],
        ("lost", 1),
        "rank 1 cannot be reached any more",
    ),
}


@each_row("case", CASES)
def test_the_first_cause(case):
    reports, expected, message = CASES[case]
    ending = first_cause(dict(enumerate(reports)))
    assert (ending.how, ending.rank) == expected and str(ending.message).startswith(message)
    aborted = [rank for rank, report in enumerate(reports) if report.is_gone and ending.how == "hung"]
    assert ("; NCCL aborted rank " in str(ending.message)) == bool(aborted)
    about = {"hung": "missing in all_reduce #2 of 10 float32", "mismatched": "all_reduce #2 of 10 float32"}
    assert ending.collective == about.get(ending.how, ending.collective) or ending.rank in aborted
    assert ending.rank is None or not reports[ending.rank].state.phase or ending.step == 7
    assert ending.how != "failed" or ending.traceback == "trace"


def test_ranks_that_wait_for_each_other_in_different_groups():
    """Nothing differs within a group, and no timeout has passed, but no rank will ever continue."""
    fifth = entry(5, group="ranks 0,1 (2)")
    waiting = state(0, first_call, entry(4, group="ranks 0,1 (2)"), fifth, waits=True)
    peer = state(1, entry(4, group="ranks 0,1 (2)"), first_call, second_call, waits=True)
    ending = first_cause({0: ended(waiting, "mismatch"), 1: ended(peer, "noticed")})
    assert ending.how == "mismatched" and ending.step == 7
    assert "rank 0 waits in all_reduce #5" in str(ending.message) and "rank 1 has not issued" in str(ending.message)
    assert find_mismatch({0: waiting, 1: peer}, waiting=(0, 1)) is not None
    for goes_on in (replace(peer, waits_for=None), replace(peer, entries=(*peer.entries, fifth))):
        assert find_mismatch({0: waiting, 1: goes_on}, waiting=(0, 1)) is None, "rank 1 may issue it, or rank 0 goes on"


@each_row(
    "error, in_collective, expected",
    [
        (ValueError("timed out"), False, "failed"),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), False, "connection"),
        (RuntimeError("Timed out waiting 6000ms for recv operation"), True, "timeout"),
        (
            dist.DistBackendError("Watchdog caught collective operation timeout: NCCL operation timed out"),
            False,
            "timeout",
        ),
        (dist.DistBackendError("NCCL operation failed"), False, "collective"),
        (RuntimeError("op.preamble.length <= op.nbytes"), True, "collective"),
    ],
)
def test_exceptions_of_collectives_are_told_from_others(error, in_collective, expected):
    assert kind_of(error, in_collective) == expected
