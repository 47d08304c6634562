"""Collectives that a device runs: what is known of them, and when a hang is declared."""

import time

import pytest
import torch

from ddp_lab.collectives.calls import Call
from ddp_lab.runtime.watch import on_device
from ddp_lab.runtime.watch.cause import RankReport, first_cause
from ddp_lab.runtime.watch.flight_recorder import ExitReason, FlightRecorder, RankState
from ddp_lab.runtime.watch.on_device import DeviceCollectives
from ddp_lab.runtime.watch.watcher import Watcher
from tests.tables import each_row

CPU = torch.device("cpu")


class Stream:
    """Marks are reached when the test says so."""

    def __init__(self):
        self.marks = []

    def mark(self, device):
        reached = [False]
        self.marks.append(reached)
        return lambda: reached[0]


class Work:
    """A collective whose state the test sets."""

    is_done = has_failed = False

    def is_completed(self):
        return self.is_done

    def is_success(self):
        return not self.has_failed


class Bench:
    def __init__(self):
        self.flight = FlightRecorder.create(rank=0)
        self.followed = DeviceCollectives(self.flight)
        self.issued = 0

    def issue(self, queue="group", timeout_s=600.0, work=None):
        self.issued += 1
        number = self.flight.add(self.issued, "all_reduce", 10, "float32", "ranks 0,1", -1, 0)
        self.followed.issue(number, queue, CPU, timeout_s)
        self.followed.issued(number, work or Work())
        return number

    @property
    def states(self):
        self.followed.look()
        return [entry.state for entry in self.flight.state().entries]


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(on_device, "mark_stream", stream.mark)
    return stream


@pytest.fixture
def bench(stream):
    bench = Bench()
    yield bench
    bench.flight.close()


def test_a_collective_is_completed_when_the_device_is_past_it(bench, stream):
    number = bench.issue()
    assert bench.states == ["queued"]
    stream.marks[0][0] = True
    assert bench.states == ["started"]
    bench.followed.ordered(number)
    assert bench.states == ["started"], "`wait` returned, and nothing is done"
    stream.marks[1][0] = True
    assert bench.states == ["completed"] and bench.followed.oldest is None


def test_one_that_nobody_has_waited_for_is_asked_itself(bench):
    failed, work = Work(), Work()
    failed.is_done = failed.has_failed = True
    bench.issue("one", work=failed)
    bench.issue("other", work=work)
    assert bench.states == ["queued", "queued"]
    work.is_done = True
    assert bench.states == ["queued", "completed"]


def test_a_later_one_of_the_same_queue_shows_that_earlier_ones_are_completed(bench):
    last = Work()
    last.is_done = True
    for queue in ("one", None, "other"):
        bench.issue(queue)
    bench.issue("one", work=last)
    assert bench.states == ["completed", "queued", "queued", "completed"]


@pytest.mark.parametrize(("timeout_s", "declared_s"), [(10.0, 8.0), (600.0, 590.0)])
def test_a_hang_is_declared_before_the_timeout(bench, timeout_s, declared_s):
    bench.issue(timeout_s=timeout_s)
    oldest = bench.followed.oldest
    assert oldest is not None
    oldest.issued_s = time.monotonic() - declared_s + 1
    bench.followed.look()
    waits_for = bench.flight.state().waits_for
    assert not oldest.is_overdue and waits_for is not None and waits_for.seq == 1, "though no thread is blocked"
    oldest.issued_s -= 2
    assert oldest.is_overdue


@each_row("waited_s, kind", [(599.0, "timeout"), (1.0, "collective")])
def test_a_backend_that_aborts_gives_the_reason(stream, monkeypatch, waited_s, kind):
    ended = []
    monkeypatch.setattr(Watcher, "end", lambda watcher, reason: ended.append(reason))
    watcher = Watcher(0, 2, lambda *_: None, lambda *_: None)
    watcher.on_device.issue(watcher.flight.add(1, "all_reduce", 1, "float32", "ranks 0,1", -1, 0), "", CPU, 600.0)
    oldest = watcher.on_device.oldest
    assert oldest is not None
    oldest.issued_s -= waited_s
    watcher.aborted()
    assert [reason.kind for reason in ended] == [kind]


# The cause, when no host is blocked ----------------------------------------------------------------------------------


def rank(number, *states, kind="timeout", root=-1, is_stopped=False):
    """A rank whose collectives 1, 2, ... are in these states."""
    entries = tuple(
        Call(seq, "all_reduce", 10, "float32", "ranks 0-2", root, 0, state, float(seq))
        for seq, state in enumerate(states, 1)
    )
    waits_for = next((entry for entry in entries if entry.state != "completed"), None)
    state = RankState(number, 7, "forward", entries, waits_for, 9.0)
    return RankReport(state, ExitReason(kind, "", 1.0), is_stopped=is_stopped)


HANGS = {
    "a host that did not issue it": (
        [rank(0, "completed", "started"), rank(1, "completed", kind="noticed"), rank(2, "completed", "started")],
        1,
        "rank 1 hangs in step 7 during forward, after all_reduce #1",
    ),
    "a device that did not come to it, though its rank timed out too": (
        [rank(0, "completed", "started"), rank(1, "started", "queued"), rank(2, "completed", "queued")],
        1,
        "rank 1 hangs on its device in step 7 during forward, in all_reduce #1",
    ),
    "a root may end before the others": (
        [rank(0, "completed", kind="noticed", root=0), rank(1, "started", root=0), rank(2, "started", root=0)],
        1,
        "every rank waits for another; rank 1 for",
    ),
    "one that is stopped is known for sure": (
        [rank(0, "queued"), rank(1, kind="noticed"), rank(2, "queued", kind="noticed", is_stopped=True)],
        2,
        "rank 2 is stopped (SIGSTOP)",
    ),
}  # fmt: skip


@each_row("case", HANGS)
def test_the_rank_that_hangs(case):
    reports, culprit, message = HANGS[case]
    ending = first_cause(dict(enumerate(reports)))
    assert (ending.how, ending.rank) == ("hung", culprit) and str(ending.message).startswith(message)
