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
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ddp_lab.record_format import Ending
from ddp_lab.runtime.errors import AgreedError, OneRankError, SequenceError, tell_torchrun
from ddp_lab.runtime.groups import host_barrier, told_through
from ddp_lab.runtime.process.launcher import SignalReceiver
from ddp_lab.runtime.watch.cause import NUMBERS, Mismatch, RankNames, RankReport, find_mismatch, first_cause
from ddp_lab.runtime.watch.flight_recorder import ExitReason, FlightRecorder, RankState, text_of
from ddp_lab.runtime.watch.on_device import DeviceCollectives
from ddp_lab.runtime.watch.phases import kills_for_memory, record_phases_in, state_of
from ddp_lab.runtime.watch.sequence import recorded_collectives

LOOK_EVERY_S, ASK_EVERY_S = 0.25, 1.0  # at ranks of this node, and the store for other nodes
COMPARE_AFTER_S = 2.0  # without progress, a rank compares what the ranks on its node have issued
SETTLE_S, REPORT_S = 2.5, 6.0  # for the ranks to say why they end, and for one of them to report
LEAVE_S = 10.0  # for a rank to leave after an error that every rank raises

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
            while not self._is_closed:
                self._look(self._signals.arrived(LOOK_EVERY_S))
        except Exception as error:  # without this thread, nobody would watch
            self.end(ExitReason.now("failed", f"watching the ranks: {text_of(error)}"))

    def _look(self, arrived: signal.Signals | None) -> None:
        if self._is_closed:
            return
        # an error that all ranks raise
        if self._agreed_at is not None:
            if time.monotonic() - self._agreed_at > LEAVE_S:
                os._exit(1)
            return
        # signals, and the ends of other ranks
        self._require_parent()
        has_one_ended = not arrived and self._peers.has_one_ended()
        if has_one_ended and (arrived := self._signals.arrived(0.1)):  # both got the signal; the other was quicker
            self._require_parent()
        if arrived:
            self.end(ExitReason.now("signal", arrived.name), code=128 + arrived)
        if has_one_ended:
            self.end(ExitReason.now("noticed", "another rank has ended"))
        # collectives that never end, or differ
        self.on_device.look()
        if (oldest := self.on_device.oldest) is not None and oldest.is_overdue:
            text = f"a collective is not done {oldest.waited_s:.0f} s after its issue"
            self.end(ExitReason.now("timeout", f"{text}, of {oldest.timeout_s:.0f} s that it may take"))
        is_stuck = time.time() - self.flight.page.progress_s > COMPARE_AFTER_S
        if is_stuck and (mismatch := self._peers.find_mismatch(self._names)):
            self.end(ExitReason.now("mismatch", mismatch.text))

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


# The other ranks as one rank sees them: on its node by their flight recorders, elsewhere by `torchrun`'s store --------


class Peers:
    """Finds the other ranks when it is created. Collective. Every access to the store may fail, because its node may be
    gone; then ranks do without it."""

    def __init__(self, flight: FlightRecorder, rank: int, world_size: int) -> None:
        self._rank, self._flight = rank, flight
        self._here: dict[int, FlightRecorder] = {}  # of the others on this node
        self._store = dist.PrefixStore("ddp-lab", _get_default_store().clone())
        self._store.set_timeout(timedelta(seconds=60))
        recorders = told_through(self._store, "recorder", rank, world_size, f"{node_name()} {flight.path}")
        for peer, recorder in enumerate(recorders):
            node, path = recorder.split(" ", 1)
            if peer != rank and node == node_name():
                with suppress(OSError):
                    self._here[peer] = FlightRecorder.open(Path(path))
        host_barrier()
        flight.unlink()
        self._store.set_timeout(timedelta(seconds=3))
        self._ask_at, self._compared = 0.0, list[int]()
        self._suspected: Mismatch | None = None
        self._elsewhere = [peer for peer in range(world_size) if peer not in {rank, *self._here}]

    def has_one_ended(self) -> bool:
        """Whether another rank ends, or has ended, before the run is completed."""
        if any(map(has_ended, self._here.values())):
            return True
        if not self._elsewhere or time.monotonic() < self._ask_at:
            return False
        self._ask_at = time.monotonic() + ASK_EVERY_S
        with suppress(RuntimeError):
            return self._store.check(["ended"])
        return False

    def find_mismatch(self, names: RankNames) -> Mismatch | None:
        """Between the ranks on this node, seen twice: a record may be read while it is written."""
        flights = self._here | {self._rank: self._flight}
        counts, before = [flight.page.count for flight in flights.values()], self._suspected
        if before is None and counts == self._compared:
            return None
        states = {rank: flight.state() for rank, flight in flights.items()}
        are_blocked = all(flight.page.waiting >= 0 for flight in flights.values())  # else others may issue more
        self._suspected = find_mismatch(states, names, waiting=states if are_blocked else ())
        self._compared = counts
        return before if before == self._suspected else None

    # The end -----------------------------------------------------------------------------------------------------

    def publish(self, rank: int, report: RankReport) -> None:
        if self._elsewhere:
            with suppress(RuntimeError):
                self._store.set(f"report/{rank}", msgspec.json.encode(report).decode())
                self._store.set("ended", "")

    def collect(self, own_report: RankReport) -> dict[int, RankReport]:
        """The reports of all ranks, once each has given a reason or is gone, or time is up."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            reports = {self._rank: own_report}
            reports |= {rank: report_of(flight) for rank, flight in self._here.items()}
            reports |= {rank: self._published(rank) for rank in self._elsewhere}
            if all(report.reason or report.is_gone for report in reports.values()) or time.monotonic() > deadline:
                return dict(sorted(reports.items()))
            time.sleep(0.05)

    def _published(self, rank: int) -> RankReport:
        with suppress(RuntimeError):
            if self._store.check([f"report/{rank}"]):
                return msgspec.json.decode(self._store.get(f"report/{rank}"), type=RankReport)
        return RankReport()

    def silent(self, reports: Mapping[int, RankReport]) -> dict[int, RankReport]:
        """Those of ranks on this node that have given no reason."""
        return {rank: report for rank, report in reports.items() if rank in self._here and report.reason is None}

    def is_chosen(self, reports: Mapping[int, RankReport]) -> bool:
        with suppress(RuntimeError):
            return self._store.compare_set("reporter", "", str(self._rank)) == str(self._rank).encode()
        return self._rank == min(rank for rank, report in reports.items() if report.reason is not None)

    def say_reported(self) -> None:
        with suppress(RuntimeError):
            self._store.set("reported", "")

    def await_report(self) -> None:
        with suppress(RuntimeError):
            self._store.wait(["reported"], timedelta(seconds=REPORT_S))

    def kill(self, rank: int) -> None:
        if not self._here[rank].owner_is_gone():
            with suppress(ProcessLookupError):
                os.kill(self._here[rank].page.pid, signal.SIGKILL)


def has_ended(flight: FlightRecorder) -> bool:
    if flight.page.is_finished:
        return False
    reason = flight.exit_reason
    if reason is not None and reason.kind == "agreed":  # this rank will raise the error too, in a moment
        return time.time() - reason.time_s > SETTLE_S
    return reason is not None or flight.owner_is_gone()


def report_of(flight: FlightRecorder) -> RankReport:
    is_finished = flight.page.is_finished
    is_gone = flight.owner_is_gone() and not is_finished
    reason = None if is_finished else flight.exit_reason
    return RankReport(
        flight.state(), reason, is_gone, flight.crash if is_gone else "", state_of(flight.page.pid) in "Tt"
    )


def node_name() -> str:
    """The same for processes that can read each other's flight recorders."""
    try:
        return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').readlink()}".replace(" ", "_")
    except OSError:
        return socket.gethostname().replace(" ", "_")
