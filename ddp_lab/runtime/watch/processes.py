"""What the operating system tells about this process, its node and the other ranks."""

import os
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

STOPPING = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGXCPU, signal.SIGUSR2]
"""Signals that end a process without a word, unless it answers them; SIGHUP too, but not under nohup."""
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    STOPPING.append(signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal has ended what this process did. `is_said`: a line says so already."""

    def __init__(self, number: int, is_said: bool = False) -> None:
        self.number, self.is_said = number, is_said


_arrived: list[int] = []


def raise_stopped(number: int, frame: object) -> NoReturn:
    """A handler of signals. A library whose import it interrupts may take its error for one of the import."""
    _arrived.append(number)
    raise Stopped(number)


def require_not_stopped() -> None:
    """
    Raises:
        Stopped: a signal has arrived, and the error was lost.
    """
    if _arrived:
        raise Stopped(_arrived[0])


def answer_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """Let `handler` answer all that are `STOPPING`."""
    for number in STOPPING:
        signal.signal(number, handler)


class SignalReceiver:
    """Collects the signals that are `STOPPING`. Another thread can then react to them while the training thread is
    blocked."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        answer_signals(lambda *_: None)

    def stop(self) -> None:
        signal.set_wakeup_fd(-1)
        answer_signals(signal.SIG_DFL)

    def arrived(self, timeout_s: float) -> signal.Signals | None:
        """The signal that has arrived, or None after `timeout_s` seconds."""
        if not select.select([self._read], [], [], timeout_s)[0]:
            return None
        return next((signal.Signals(number) for number in os.read(self._read, 64) if number in STOPPING), None)


def state_of(pid: int) -> str:
    """The letter of proc(5) for the state of a process: of one that is stopped T or t, of a zombie Z. `?` if the system
    does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


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
