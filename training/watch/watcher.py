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
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from training.errors import AgreedError, OneRankError, SequenceError
from training.watch.cause import Ending, RankReport, first_cause
from training.watch.exit_reason import ExitReason, text_of
from training.watch.flight_recorder import FlightRecorder
from training.watch.mismatch import Mismatch, find_deadlock, find_difference
from training.watch.phases import record_phases_in
from training.watch.processes import SignalReceiver, is_stopped, kills_for_memory, node_name
from training.watch.rank_state import RankState
from training.watch.sequence import recorded_collectives

LOOK_EVERY_S = 0.25
LOOK_INTO_STORE_EVERY_S = 1.0
SETTLE_S = 2.5
"""How long the ranks have to say why they end."""
REPORT_S = 6.0
"""How long the others wait for the rank that reports."""
STALL_S = 2.0
"""Without progress for this long, a rank compares what all ranks have issued."""
LEAVE_S = 10.0
"""How long a rank may take to leave after an error that every rank raises."""
NOTICED = "another rank has ended"

Report = Callable[[Ending, Mapping[int, RankReport]], None]
KeepFlight = Callable[[int, RankState], None]


class Watcher:
    """Watches from `start` until `close`.

    Args:
        report: Called on one rank when the run ends in trouble. It tells the user and writes the run record.
        keep_flight: Called on every rank before it ends. It writes the flight record of a rank.
    """

    def __init__(self, rank: int, world_size: int, report: Report, keep_flight: KeepFlight) -> None:
        self.flight = FlightRecorder.create(rank)
        self._rank, self._world_size = rank, world_size
        self._report, self._keep_flight = report, keep_flight
        self._peers: dict[int, tuple[FlightRecorder, int]] = {}  # on this node, with their process ids
        self._elsewhere: list[int] = []  # ranks on other nodes
        self._ending = threading.Lock()
        self._is_closed = False
        self._agreed_at: float | None = None
        self._parent = os.getppid()
        self._killed_before = kills_for_memory()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def start(self) -> None:
        """Find the other ranks, and begin to watch them. Collective."""
        prefix = f"ddp-lab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = dist.PrefixStore(prefix, _get_default_store().clone())
        self._store.set_timeout(timedelta(seconds=60))
        self._store.set(f"recorder/{self._rank}", f"{node_name()} {os.getpid()} {self.flight.path}")
        for rank in range(self._world_size):
            node, pid, path = self._store.get(f"recorder/{rank}").decode().split(" ", 2)
            if rank != self._rank and node == node_name():
                with suppress(OSError):
                    self._peers[rank] = (FlightRecorder.open(Path(path)), int(pid))
        dist.barrier()
        self.flight.unlink()
        self._store.set_timeout(timedelta(seconds=3))
        self._elsewhere = [rank for rank in range(self._world_size) if rank not in {self._rank, *self._peers}]
        faulthandler.enable(file=self.flight.crash_file)
        self._signals = SignalReceiver()
        record_phases_in(self.flight)
        self._thread.start()

    def close(self) -> None:
        """The run is completed: stop watching."""
        self.flight.finish()
        self._is_closed = True
        self._thread.join()
        record_phases_in(None)
        faulthandler.enable()
        self._signals.stop()

    def agree(self, error: Exception) -> None:
        """An error that all ranks raise. Rank 0 reports it elsewhere, and each rank leaves by itself."""
        self.flight.set_exit_reason(ExitReason.now("agreed", str(error)))
        if isinstance(error, SequenceError):
            self._keep_flight(self._rank, self.flight.state())
        self._agreed_at = time.monotonic()

    def fail(self, error: BaseException) -> NoReturn:
        """An error of this rank alone."""
        self.end(ExitReason.of(error, in_collective=self.flight.state().waits_for is not None))

    @property
    def thread_id(self) -> int:
        """Of the thread that watches, once it runs."""
        assert self._thread.ident is not None, "started"
        return self._thread.ident

    # The thread ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._look_until_closed()
        except Exception as error:  # without this thread, nobody would watch
            self.end(ExitReason.now("failed", f"watching the ranks: {text_of(error)}"))

    def _look_until_closed(self) -> None:
        next_look_into_store = 0.0
        suspected: Mismatch | None = None
        compared: list[int] = []
        while not self._is_closed:
            arrived = self._signals.arrived(LOOK_EVERY_S)
            if self._is_closed:
                return
            if self._agreed_at is not None:
                if time.monotonic() - self._agreed_at > LEAVE_S:
                    os._exit(1)
                continue
            if arrived:
                self._end_by(arrived)
            if os.getppid() != self._parent:
                self.end(ExitReason.now("orphaned", "torchrun has gone"))
            if any(has_ended(flight) for flight, _ in self._peers.values()):
                if arrived := self._signals.arrived(0.1):  # both ranks got the signal, and the other was quicker
                    self._end_by(arrived)
                self.end(ExitReason.now("noticed", NOTICED))
            if time.time() - self.flight.progress_s > STALL_S:
                counts = [flight.count for flight in self._flights().values()]
                if suspected or counts != compared:
                    found = self._find_mismatch()
                    if found and found == suspected:  # seen twice: a record may be read while it is written
                        self.end(ExitReason.now("mismatch", found.text))
                    suspected, compared = found, counts
            if self._elsewhere and time.monotonic() > next_look_into_store:
                next_look_into_store = time.monotonic() + LOOK_INTO_STORE_EVERY_S
                with suppress(RuntimeError):  # the store's node may be gone; then collectives fail
                    if self._store.check(["ended"]):
                        self.end(ExitReason.now("noticed", NOTICED))

    def _end_by(self, arrived: signal.Signals) -> NoReturn:
        self.end(ExitReason.now("signal", arrived.name), code=128 + arrived)

    def _flights(self) -> dict[int, FlightRecorder]:
        return {self._rank: self.flight} | {rank: flight for rank, (flight, _) in self._peers.items()}

    def _find_mismatch(self) -> Mismatch | None:
        states = {rank: flight.state() for rank, flight in self._flights().items()}
        return find_difference({rank: state.entries for rank, state in states.items()}) or find_deadlock(states)

    # The end ------------------------------------------------------------------------------------------------------

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
        self.flight.set_exit_reason(reason)
        state = self.flight.state()
        own = RankReport(state, reason)
        self._publish(self._rank, own)
        reports = self._collect(own)
        vanished = {r: report for r, report in reports.items() if r in self._peers and report.reason is None}
        for rank, report in vanished.items():
            if report.is_gone:
                self._publish(rank, report)
        ending = first_cause(reports, kills_for_memory() > self._killed_before)
        first = reports[0].reason
        rank0_reports = first is not None and first.kind == "agreed"
        with suppress(Exception):  # the run's folder may be gone, or the disk full; the report comes all the same
            self._keep_flight(self._rank, state)
        if not rank0_reports and self._is_chosen(reports):
            for rank, report in vanished.items():
                if report.state is not None:
                    self._keep_flight(rank, report.state)
            self._report(ending, reports)
            with suppress(RuntimeError):
                self._store.set("reported", "")
        for rank in vanished:  # a process that is stopped would keep torchrun waiting for 30 s
            flight, pid = self._peers[rank]
            if not flight.owner_is_gone():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if not rank0_reports:
            self._await_report()

    def _publish(self, rank: int, report: RankReport) -> None:
        """Leave a report for the ranks on other nodes."""
        if self._elsewhere:
            with suppress(RuntimeError):
                self._store.set(f"report/{rank}", msgspec.json.encode(report).decode())
                self._store.set("ended", "")

    def _collect(self, own: RankReport) -> dict[int, RankReport]:
        """The reports of all ranks, once each has given a reason or is gone, or time is up."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            reports = {self._rank: own}
            reports |= {rank: report_of(flight, pid) for rank, (flight, pid) in self._peers.items()}
            reports |= {rank: self._published(rank) for rank in self._elsewhere}
            if all(report.reason or report.is_gone for report in reports.values()) or time.monotonic() > deadline:
                return dict(sorted(reports.items()))
            time.sleep(0.05)

    def _published(self, rank: int) -> RankReport:
        with suppress(RuntimeError):
            if self._store.check([f"report/{rank}"]):
                return msgspec.json.decode(self._store.get(f"report/{rank}"), type=RankReport)
        return RankReport(None, None)

    def _is_chosen(self, reports: Mapping[int, RankReport]) -> bool:
        with suppress(RuntimeError):
            return self._store.compare_set("reporter", "", str(self._rank)) == str(self._rank).encode()
        return self._rank == min(rank for rank, report in reports.items() if report.reason is not None)

    def _await_report(self) -> None:
        deadline = time.monotonic() + REPORT_S
        with suppress(RuntimeError):
            while time.monotonic() < deadline and not self._store.check(["reported"]):
                time.sleep(0.05)


def has_ended(flight: FlightRecorder) -> bool:
    """Whether the rank of this recorder ends, or has ended, before the run is completed."""
    if flight.is_finished:
        return False
    reason = flight.exit_reason
    if reason is not None and reason.kind == "agreed":  # this rank will raise the error too, in a moment
        return time.time() - reason.time_s > SETTLE_S
    return reason is not None or flight.owner_is_gone()


def report_of(flight: FlightRecorder, pid: int) -> RankReport:
    """What the flight recorder of a rank on this node tells."""
    is_gone = flight.owner_is_gone() and not flight.is_finished
    reason = None if flight.is_finished else flight.exit_reason
    return RankReport(flight.state(), reason, is_gone, flight.crash if is_gone else "", is_stopped(pid))


@contextmanager
def watched(rank: int, world_size: int, report: Report, keep_flight: KeepFlight) -> Iterator[Watcher]:
    """Within this context the ranks watch each other. An error of one ends them all with one report. Collective."""
    watcher = Watcher(rank, world_size, report, keep_flight)
    watcher.start()
    with recorded_collectives(watcher.flight):
        try:
            yield watcher
            dist.barrier()
        except BaseException as error:
            if isinstance(error, OneRankError) or not isinstance(error, AgreedError):
                watcher.fail(error)
            watcher.agree(error)
            raise
    watcher.close()
