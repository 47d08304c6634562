"""Every rank watches the others: when one dies, fails or hangs, one of them says which and why, and all end at once.

A thread of each rank looks four times a second at the boards (`board.py`) of the ranks on its node and, once a
second, at the store where `torchrun` lets ranks of other nodes leave word. Signals reach this thread even while the
training thread is blocked in a collective. The end has the same steps for whoever comes to it first: leave a statement,
wait a moment for those of the others, let one rank report (the store decides), kill what does not react, exit.
"""

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from training.errors import AgreedError, OneRankError, SequenceError, tell_torchrun
from training.watch.board import Board, Place
from training.watch.cause import Ending, Seen, Statement, first_cause
from training.watch.phases import show_phases_on
from training.watch.sequence import deadlock, difference, recorded_collectives

LOOK_EVERY_S = 0.25
ASK_STORE_EVERY_S = 1.0
SETTLE_S = 2.5
"""How long the ranks may take to say what happened to them."""
REPORT_S = 6.0
"""How long the others wait for the one that reports."""
STALL_S = 2.0
"""Without progress for this long, ranks compare what they have issued."""
COMPARED = 256
"""How many of the latest collectives they compare."""
STOPPING = (signal.SIGINT, signal.SIGTERM)
LEAVE_S = 10.0
"""How long a rank may take to leave after an error that every rank raises."""

Report = Callable[[Ending, Mapping[int, Seen]], None]


class Watcher:
    """Watches from its `start` until `close`.

    Args:
        report: Called on one rank when the run ends in trouble: says so, and writes the record.
        keep_flight: Called on every rank before it ends: writes the flight record of a rank whose place is known.
    """

    def __init__(self, rank: int, world_size: int, report: Report, keep_flight: Callable[[int, Place], None]) -> None:
        self.board = Board.make(rank)
        self._rank, self._world_size = rank, world_size
        self._report, self._keep_flight = report, keep_flight
        self._peers: dict[int, tuple[Board, int]] = {}  # with the process's id
        self._ending = threading.Lock()
        self._is_closed = False
        self._agreed_at: float | None = None
        self._parent = os.getppid()
        self._killed_before = kills_for_memory()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def start(self) -> None:
        """Meet the others. Collective."""
        prefix = f"ddp-lab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = dist.PrefixStore(prefix, _get_default_store().clone())
        self._store.set_timeout(timedelta(seconds=60))
        self._store.set(f"board/{self._rank}", f"{node_name()} {os.getpid()} {self.board.path}")
        for rank in range(self._world_size):
            node, pid, path = self._store.get(f"board/{rank}").decode().split(" ", 2)
            if rank != self._rank and node == node_name():
                with suppress(OSError):
                    self._peers[rank] = (Board.open(Path(path)), int(pid))
        dist.barrier()
        self.board.hide()
        self._store.set_timeout(timedelta(seconds=3))
        self._elsewhere = [rank for rank in range(self._world_size) if rank not in {self._rank, *self._peers}]
        faulthandler.enable(file=self.board.crash_file)
        self._signals = SignalReceiver()
        show_phases_on(self.board)
        self._thread.start()

    def close(self) -> None:
        """The run has ended well: watch no more."""
        self.board.finish()
        self._is_closed = True
        self._thread.join()
        show_phases_on(None)
        faulthandler.enable()
        self._signals.stop()

    def agree(self, error: Exception) -> None:
        """An error that all ranks raise: rank 0 says it, outside of here, and each leaves in its own time."""
        self.board.state(asdict(Statement("agreed", str(error), time.time())))
        if isinstance(error, SequenceError):
            self._keep_flight(self._rank, self.board.place())
        self._agreed_at = time.monotonic()

    def fail(self, error: BaseException) -> NoReturn:
        """An error of this rank alone."""
        if isinstance(error, AgreedError):
            self.end(Statement("error", str(error), time.time()))
        in_collective = self.board.place().waits_for is not None
        trace = "".join(traceback.format_exception(error))
        self.end(Statement(kind_of(error, in_collective), text_of(error), time.time(), trace))

    @property
    def thread_id(self) -> int:
        """Of the thread that watches, once it runs."""
        assert self._thread.ident is not None, "started"
        return self._thread.ident

    # The thread ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._look_until_closed()
        except Exception as error:  # nobody would watch any more, and nobody would know
            self.end(Statement("failed", f"watching the ranks: {text_of(error)}", time.time()))

    def _look_until_closed(self) -> None:
        next_ask = 0.0
        suspicion: str | None = None
        compared: list[int] = []
        while not self._is_closed:
            self.board.beat()
            arrived = self._signals.arrived(LOOK_EVERY_S)
            if self._is_closed:
                return
            if self._agreed_at is not None:
                if time.monotonic() - self._agreed_at > LEAVE_S:
                    os._exit(1)
                continue
            if arrived:
                self.end(Statement("signal", signal.Signals(arrived).name, time.time()), 128 + arrived)
            if os.getppid() != self._parent:
                self.end(Statement("orphaned", "torchrun has gone", time.time()))
            if any(self._has_ended(board) for board, _ in self._peers.values()):
                if arrived := self._signals.arrived(0.1):  # both were told to stop, and the other was quicker
                    self.end(Statement("signal", signal.Signals(arrived).name, time.time()), 128 + arrived)
                self.end(Statement("noticed", "another rank has ended", time.time()))
            if time.time() - self.board.since_s() > STALL_S:
                counts = [board.count() for board in self._boards().values()]
                if suspicion or counts != compared:
                    found = self._parting()
                    if found and found == suspicion:  # twice: a board may be read while it is written
                        self.end(Statement("mismatch", found, time.time()))
                    suspicion, compared = found, counts
            if self._elsewhere and time.monotonic() > next_ask:
                next_ask = time.monotonic() + ASK_STORE_EVERY_S
                with suppress(RuntimeError):  # the store's node may be gone, which the group will notice
                    if self._store.check(["ended"]):
                        self.end(Statement("noticed", "another rank has ended", time.time()))

    def _has_ended(self, board: Board) -> bool:
        if board.is_finished():
            return False
        statement = board.statement()
        if statement is not None and statement["kind"] == "agreed":  # this rank will raise it too, in a moment
            return time.time() - statement["time_s"] > SETTLE_S
        return statement is not None or board.is_abandoned()

    def _boards(self) -> dict[int, Board]:
        return {self._rank: self.board} | {rank: board for rank, (board, _) in self._peers.items()}

    def _parting(self) -> str | None:
        places = {rank: board.place(COMPARED) for rank, board in self._boards().items()}
        return difference({rank: place.entries for rank, place in places.items()}) or deadlock(places)

    # The end ------------------------------------------------------------------------------------------------------

    def end(self, statement: Statement, code: int = 1) -> NoReturn:
        """End this process, and with it the run, after one rank has said why. The first thread that comes here does."""
        self._ending.acquire()  # never released: whoever comes second waits for the process to end
        hurry = threading.Timer(SETTLE_S + 2 * REPORT_S, os._exit, (code,))  # writing may block, as on a dead NFS
        hurry.daemon = True
        hurry.start()
        with suppress(Exception):  # an end must come, whatever else breaks
            self._end(statement)
        sys.stderr.flush()
        os._exit(code)

    def _end(self, statement: Statement) -> None:
        self.board.state(asdict(statement))
        mine = Seen(self.board.place(), statement)
        self._tell(self._rank, mine)
        seen = self._settle(mine)
        for rank, one in seen.items():
            if rank in self._peers and one.is_gone and one.statement is None:
                self._tell(rank, one)  # for those on other nodes
        ending = first_cause(seen, kills_for_memory() > self._killed_before)
        first = seen[0].statement
        told = first is not None and first.kind == "agreed"
        if mine.place is not None:
            with suppress(Exception):  # the run's folder may be gone, or the disk full: the report comes all the same
                self._keep_flight(self._rank, mine.place)
        if not told and self._is_chosen(seen):
            for rank, one in seen.items():
                if rank in self._peers and one.place is not None and one.statement is None:
                    self._keep_flight(rank, one.place)
            self._report(ending, seen)
            with suppress(RuntimeError):
                self._store.set("reported", "")
        tell_torchrun(f"error: {ending.message}", statement.time_s)
        self._kill_silent(seen)
        if not told:
            self._await_report()

    def _tell(self, rank: int, one: Seen) -> None:
        if not self._elsewhere:
            return
        word = {"place": one.place.to_dict() if one.place else None, "is_gone": one.is_gone, "crash": one.crash}
        word["statement"] = asdict(one.statement) if one.statement else None
        with suppress(RuntimeError):
            self._store.set(f"said/{rank}", json.dumps(word))
            self._store.set("ended", "")

    def _settle(self, mine: Seen) -> dict[int, Seen]:
        """What is known of every rank, once all have said something or are gone, or time is up."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            seen = {self._rank: mine}
            seen |= {rank: look_at(board, pid) for rank, (board, pid) in self._peers.items()}
            seen |= {rank: self._hear_of(rank) for rank in self._elsewhere}
            open_ranks = [rank for rank, one in seen.items() if one.statement is None and not one.is_gone]
            if not open_ranks or time.monotonic() > deadline:
                return dict(sorted(seen.items()))
            time.sleep(0.05)

    def _hear_of(self, rank: int) -> Seen:
        with suppress(RuntimeError):
            if self._store.check([f"said/{rank}"]):
                word = json.loads(self._store.get(f"said/{rank}"))
                place = Place.from_dict(word["place"]) if word["place"] else None
                said = Statement(**word["statement"]) if word["statement"] else None
                return Seen(place, said, word["is_gone"], word["crash"])
        return Seen(None, None)

    def _is_chosen(self, seen: Mapping[int, Seen]) -> bool:
        with suppress(RuntimeError):
            return self._store.compare_set("reporter", "", str(self._rank)) == str(self._rank).encode()
        return self._rank == min(rank for rank, one in seen.items() if one.statement is not None)

    def _await_report(self) -> None:
        deadline = time.monotonic() + REPORT_S
        with suppress(RuntimeError):
            while time.monotonic() < deadline and not self._store.check(["reported"]):
                time.sleep(0.05)

    def _kill_silent(self, seen: Mapping[int, Seen]) -> None:
        """A process that is stopped would keep torchrun waiting for 30 s."""
        for rank, (board, pid) in self._peers.items():
            if seen[rank].statement is None and not board.is_abandoned():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def look_at(board: Board, pid: int) -> Seen:
    """What the board of a rank on this node tells."""
    said = board.statement()
    is_gone = board.is_abandoned() and not board.is_finished()
    statement = Statement(**said) if said else None
    return Seen(board.place(), statement, is_gone, board.crash() if is_gone else "", is_stopped(pid))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, where the system tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def kills_for_memory() -> int:
    """How many processes the kernel has killed for want of memory since it started; 0 where it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def node_name() -> str:
    """The same for processes that can read each other's boards."""
    try:
        return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').readlink()}".replace(" ", "_")
    except OSError:
        return socket.gethostname().replace(" ", "_")


COLLECTIVE_WORDS = ("gloo", "nccl", "processgroup", "process group", "connection", "collective", "broken pipe")


def kind_of(error: BaseException, in_collective: bool) -> str:
    """The kind of statement that an exception makes."""
    text = str(error).lower()
    if not in_collective and not (isinstance(error, RuntimeError) and any(word in text for word in COLLECTIVE_WORDS)):
        return "failed"
    if "timed out" in text or "timeout" in text:
        return "timeout"
    return "connection" if "connection" in text or "broken pipe" in text or "reset by peer" in text else "collective"


def text_of(error: BaseException) -> str:
    """An exception in one line; memory that cannot be had with what to do about it."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
        text = f"out of memory ({text}); use a smaller --global-batch-size or model, or raise --grad-accum-steps"
    return text


class SignalReceiver:
    """From now on SIGINT and SIGTERM are only noted; the training thread, perhaps blocked, need not run for that."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in STOPPING:
            signal.signal(number, lambda *_: None)

    def stop(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)

    def arrived(self, timeout_s: float) -> int:
        """The signal that has arrived, or 0 after `timeout_s`."""
        if not select.select([self._read], [], [], timeout_s)[0]:
            return 0
        return next((number for number in os.read(self._read, 64) if number in STOPPING), 0)


@contextmanager
def watched(rank: int, world_size: int, report: Report, keep_flight: Callable[[int, Place], None]) -> Iterator[Watcher]:
    """Within this context the ranks watch each other; an error of one ends them all, with one report. Collective."""
    watcher = Watcher(rank, world_size, report, keep_flight)
    watcher.start()
    with recorded_collectives(watcher.board):
        try:
            yield watcher
            dist.barrier()
        except BaseException as error:
            if isinstance(error, OneRankError) or not isinstance(error, AgreedError):
                watcher.fail(error)
            watcher.agree(error)
            raise
    watcher.close()
