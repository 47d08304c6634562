"""The other ranks as one rank sees them: on its node by their flight recorders, elsewhere by `torchrun`'s store."""

import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ddp_lab.runtime.groups import host_barrier, told_through
from ddp_lab.runtime.watch.cause import Mismatch, RankNames, RankReport, find_mismatch
from ddp_lab.runtime.watch.flight_recorder import FlightRecorder
from ddp_lab.runtime.watch.phases import process_stat

SETTLE_S = 2.5
"""How long the ranks have to say why they end."""
ASK_EVERY_S = 1.0
REPORT_S = 6.0
"""How long the others wait for the rank that reports."""


class Peers:
    """Finds the other ranks when it is created. Collective.

    Every access to the store may fail, because its node may be gone. Then ranks do without it.
    """

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
        """Whether another rank ends, or has ended, before the run is completed. About other nodes, the store is asked
        once in `ASK_EVERY_S`."""
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
        """The reports of those ranks on this node that have given no reason."""
        return {rank: report for rank, report in reports.items() if rank in self._here and report.reason is None}

    def is_chosen(self, reports: Mapping[int, RankReport]) -> bool:
        """Whether this rank is the one that reports to the user."""
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
        """Kill a rank on this node, if it still runs."""
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
    """What the flight recorder of a rank on this node tells."""
    is_finished = flight.page.is_finished
    is_gone = flight.owner_is_gone() and not is_finished
    reason = None if is_finished else flight.exit_reason
    return RankReport(
        flight.state(), reason, is_gone, flight.crash if is_gone else "", state_of(flight.page.pid) in "Tt"
    )


def state_of(pid: int) -> str:
    """The letter of proc(5) for the state of a process: of one that is stopped T or t, of a zombie Z. `?` if the system
    does not tell."""
    return next(iter(process_stat(pid)), "?")


def kills_for_memory() -> int:
    """How many processes the kernel has killed because memory ran out, since it started; 0 if it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def node_name() -> str:
    """The same for processes that can read each other's flight recorders."""
    try:
        return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').readlink()}".replace(" ", "_")
    except OSError:
        return socket.gethostname().replace(" ", "_")
