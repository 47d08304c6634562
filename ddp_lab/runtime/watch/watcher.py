"""Every rank watches the others. When one dies, fails or hangs, one rank reports which and why, and all end at once.

A thread of each rank looks at the flight recorders of the ranks on its node four times a second. Ranks on other nodes
leave their reports in `torchrun`'s store, where it looks once a second. The thread also receives signals, because the
training thread may be blocked in a collective. The first thread of a process that sees an end takes the same steps on
every rank: record its own reason, wait a moment for the reasons of the other ranks, let one rank report (the store
picks it), kill ranks that do not react, exit.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NoReturn

from ddp_lab.collectives.calls import Call
from ddp_lab.record_format import Ending
from ddp_lab.runtime.errors import AgreedError, OneRankError, SequenceError, tell_torchrun
from ddp_lab.runtime.groups import host_barrier
from ddp_lab.runtime.process.launcher import SignalReceiver
from ddp_lab.runtime.watch.cause import NUMBERS, RankNames, RankReport, first_cause
from ddp_lab.runtime.watch.flight_recorder import ExitReason, FlightRecorder, RankState, text_of
from ddp_lab.runtime.watch.on_device import DeviceCollectives
from ddp_lab.runtime.watch.peers import REPORT_S, SETTLE_S, Peers, kills_for_memory, state_of
from ddp_lab.runtime.watch.phases import record_phases_in
from ddp_lab.runtime.watch.sequence import recorded_collectives

LOOK_EVERY_S = 0.25
COMPARE_AFTER_S = 2.0
"""Without progress for this long, a rank compares what the ranks on its node have issued."""
LEAVE_S = 10.0
"""How long a rank may take to leave after an error that every rank raises."""

Report = Callable[[Ending, Mapping[int, RankReport]], None]
KeepFlight = Callable[[int, RankState], None]


class Watcher:
    """Watches within `watching`.

    `report` is called on one rank when the run ends in trouble: it tells the user and writes the run record.
    `keep_flight` is called on every rank before it ends: it writes the flight record of a rank.
    """

    def __init__(
        self, rank: int, world_size: int, report: Report, keep_flight: KeepFlight, names: RankNames = NUMBERS
    ) -> None:
        self.flight = FlightRecorder.create(rank)
        self.on_device = DeviceCollectives(self.flight)
        self._rank, self._world_size = rank, world_size
        self._report, self._keep_flight, self._names = report, keep_flight, names
        self._ending = threading.Lock()
        self._is_closed = False
        self._agreed_at: float | None = None
        self._parent = os.getppid()
        self._killed_before = kills_for_memory()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    @contextmanager
    def watching(self) -> Iterator["Watcher"]:
        """Within this context the ranks watch each other. An error of one ends them all with one report. Collective."""
        self._peers = Peers(self.flight, self._rank, self._world_size)
        self.flight.keep_crashes()
        self._signals = SignalReceiver()
        record_phases_in(self.flight.set_phase)
        self._thread.start()
        with recorded_collectives(self.flight, self.on_device, self.aborted, self._names):
            try:
                yield self
                host_barrier()
            except BaseException as error:
                if isinstance(error, OneRankError) or not isinstance(error, AgreedError):
                    self.end(ExitReason.of(error, in_collective=self.flight.page.waiting >= 0))
                self._agree(error)
                raise
        self.flight.page.is_finished = True  # the run is completed
        self._is_closed = True
        self._thread.join()
        record_phases_in(None)
        faulthandler.enable()
        self._signals.stop()

    def latest_collectives(self) -> tuple[Call, ...]:
        return self.flight.state().entries

    def _agree(self, error: Exception) -> None:
        """An error that all ranks raise. Rank 0 reports it elsewhere, and each rank leaves by itself."""
        self.flight.set_exit_reason(ExitReason.now("agreed", str(error)))
        if isinstance(error, SequenceError):
            self._keep_flight(self._rank, self.flight.state())
        self._agreed_at = time.monotonic()

    def aborted(self) -> None:
        """The backend ends this process when this returns, which it does not: a collective failed or timed out."""
        oldest = self.on_device.oldest
        is_late = oldest is not None and oldest.is_overdue
        self.end(ExitReason.now("timeout" if is_late else "collective", "the backend ends the process"))

    def _watch(self) -> None:
        try:
            self._look_until_closed()
        except Exception as error:  # without this thread, nobody would watch
            self.end(ExitReason.now("failed", f"watching the ranks: {text_of(error)}"))

    def _look_until_closed(self) -> None:
        while not self._is_closed:
            arrived = self._signals.arrived(LOOK_EVERY_S)
            if self._is_closed:
                return
            if self._agreed_at is not None:
                if time.monotonic() - self._agreed_at > LEAVE_S:
                    os._exit(1)
                continue
            self._require_parent()
            if arrived:
                self._end_by(arrived)
            if self._peers.has_one_ended():
                if arrived := self._signals.arrived(0.1):  # both got the signal; the other was quicker
                    self._end_by(arrived)
                self.end(ExitReason.now("noticed", "another rank has ended"))
            self.on_device.look()
            if (oldest := self.on_device.oldest) is not None and oldest.is_overdue:
                text = f"a collective is not done {oldest.waited_s:.0f} s after its issue"
                self.end(ExitReason.now("timeout", f"{text}, of {oldest.timeout_s:.0f} s that it may take"))
            is_stuck = time.time() - self.flight.page.progress_s > COMPARE_AFTER_S
            if is_stuck and (mismatch := self._peers.find_mismatch(self._names)):
                self.end(ExitReason.now("mismatch", mismatch.text))

    def _end_by(self, arrived: signal.Signals) -> NoReturn:
        self._require_parent()
        self.end(ExitReason.now("signal", arrived.name), code=128 + arrived)

    def _require_parent(self) -> None:
        """End if the parent has gone. A forked rank then gets a signal, too, perhaps before its last thread ends."""
        if os.getppid() != self._parent or state_of(self._parent) == "Z":
            self.end(ExitReason.now("orphaned", "torchrun has gone"))

    def end(self, reason: ExitReason, code: int = 1) -> NoReturn:
        """End this process, and with it the run, after one rank has reported. The first thread to call this does it."""
        self._ending.acquire()  # never released: a second thread waits here for the process to end
        deadline = threading.Timer(SETTLE_S + 2 * REPORT_S, os._exit, (code,))  # a write may block, as on a dead NFS
        deadline.daemon = True
        deadline.start()
        with suppress(Exception):  # the process must end, whatever else breaks
            self._end(reason)
        sys.stderr.flush()
        os._exit(code)

    def _end(self, reason: ExitReason) -> None:
        peers, state = self._peers, self.flight.state()
        self.flight.set_exit_reason(reason)
        own_report = RankReport(state, reason)
        peers.publish(self._rank, own_report)
        reports = peers.collect(own_report)
        silent = peers.silent(reports)
        for rank, report in silent.items():
            if report.is_gone:
                peers.publish(rank, report)
        ending = first_cause(reports, kills_for_memory() > self._killed_before, self._names)
        with suppress(Exception):  # the run's folder may be gone, or the disk full; the report comes all the same
            self._keep_flight(self._rank, state)
        first = reports[0].reason
        rank0_reports = first is not None and first.kind == "agreed"
        if not rank0_reports and peers.is_chosen(reports):
            for rank, report in silent.items():
                self._keep_flight(rank, report.state)
            self._report(ending, reports)
            peers.say_reported()
        tell_torchrun(f"error: {ending.message}", reason.time_s + 1)  # torchrun shows the earliest: the one reported
        for rank in silent:  # a process that is stopped would keep torchrun waiting for 30 s
            peers.kill(rank)
        if not rank0_reports:
            peers.await_report()
