"""Collectives that a device runs after the host has issued them, and how far it is with them.

On Gloo `Work.wait` returns when the collective is done. On NCCL it only makes the current stream wait: the host runs
on, and nothing tells it when the device comes to the collective, or that it never will. So the recorder marks the
stream before it issues such a collective and after it has waited, and the watcher's thread asks the marks. The
collective is `queued` until the device has done all that comes before it, `started` then, and `completed` when the
device is past it. A collective that nobody has waited for yet is asked itself (`Work.is_completed`).

A mark is an event and keeps no tensor alive. A `Work` does (its outputs, and its inputs until it is waited for), so it
is held only until it is waited for or completed.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from ddp_lab.collectives.calls import COMPLETED, QUEUED, STARTED
from ddp_lab.runtime.watch.flight_recorder import FlightRecorder

Query = Callable[[], bool]
"""Asks without waiting. Any thread may call it."""

STALL_S = 2.0
"""A rank waits for a collective of its device once that has been open for so long."""
ALLOWED_SHARE, REPORT_MARGIN_S = 0.8, 10.0
"""A hang is declared after so much of the timeout, or so long before it ends, whichever is later: then the ranks have
time to report before NCCL's watchdog ends the process."""


def only_orders_streams(backend: Backend, device: torch.device) -> bool:
    """Whether `Work.wait` of `backend` returns before a collective of tensors on `device` is done."""
    return device.type != "cpu" and backend.name() != "gloo"


def mark_stream(device: torch.device) -> Query:
    """Mark the current stream of `device`. The answer says whether the device has come to the mark."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def completion_of(work: dist.Work) -> Query:
    """Asks whether a collective is done. One that has failed or timed out is not, where the backend tells."""

    def query() -> bool:
        if not work.is_completed():
            return False
        try:
            return work.is_success()
        except RuntimeError:  # torch's older class for NCCL does not answer; its watchdog tells of failures
            return True

    return query


def current(device: torch.device) -> AbstractContextManager[object]:
    """Within this context, `device` is the thread's. A new thread has GPU 0, and to ask an event there makes a context
    on it: half a GiB of GPU 0 for each rank."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass
class OpenCollective:
    """Issued, and not known to be completed.

    `queue`: its collectives are completed in the order of issue; None: it is in no queue. `issued_s`: on the monotonic
    clock. `timeout_s`: of its backend, which counts from when the host issues it. `has_started` is None once it has,
    `is_completed` until it is issued.
    """

    number: int
    queue: str | None
    device: torch.device
    issued_s: float
    timeout_s: float
    has_started: Query | None
    is_completed: Query | None = None

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.issued_s

    @property
    def is_overdue(self) -> bool:
        return self.waited_s > max(ALLOWED_SHARE * self.timeout_s, self.timeout_s - REPORT_MARGIN_S)


class DeviceCollectives:
    """Follows them in `flight`. The training thread tells what it issues, and the watcher's thread looks."""

    def __init__(self, flight: FlightRecorder) -> None:
        self._flight = flight
        self._open: dict[int, OpenCollective] = {}  # by number, oldest first

    def issue(self, number: int, queue: str | None, device: torch.device, timeout_s: float) -> None:
        """The host is about to issue a collective."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # it runs when the graph does
        self._flight.set_state(number, QUEUED)
        mark = mark_stream(device)
        self._open[number] = OpenCollective(number, queue, device, time.monotonic(), timeout_s, mark)

    def issued(self, number: int, work: dist.Work) -> None:
        if collective := self._open.get(number):
            collective.is_completed = completion_of(work)

    def ordered(self, number: int) -> None:
        """What comes now on the current stream comes after the collective: `Work.wait` has returned."""
        if collective := self._open.get(number):
            collective.is_completed = mark_stream(collective.device)

    def look(self) -> None:
        """Bring the flight recorder up to date. Called by the watcher's thread."""
        if (oldest := self.oldest) is None:
            self._flight.page.stalled = -1
            return
        completed: set[str] = set()
        with current(oldest.device):
            for collective in reversed(list(self._open.values())):
                if collective.queue in completed or answers_yes(collective.is_completed):
                    if collective.queue is not None:
                        completed.add(collective.queue)
                    self._flight.set_state(collective.number, COMPLETED)
                    self._open.pop(collective.number, None)
                elif answers_yes(collective.has_started):
                    self._flight.set_state(collective.number, STARTED)
                    collective.has_started = None
        oldest = self.oldest
        self._flight.page.stalled = oldest.number if oldest and oldest.waited_s >= STALL_S else -1

    @property
    def oldest(self) -> OpenCollective | None:
        return next(iter(list(self._open.values())), None)

    def clear(self) -> None:
        self._open.clear()


def answers_yes(query: Query | None) -> bool:
    """An error is a no: the training thread will meet it too and say what it is."""
    with suppress(RuntimeError):
        return query is not None and query()
    return False
