"""The byte counters of a link's interface: what really went over the wire, headers and start-up traffic included."""

import csv
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.link_lab.state import INTERFACE, Lab

NETWORK_NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000
COLUMNS = ("time_s", "node", "sent_bytes", "received_bytes")
"""Of `--counters`: seconds since the epoch, and bytes since the lab was made."""


@dataclass(frozen=True)
class LinkBytes:
    """Since the lab was made: bytes that a node has sent and received over its link."""

    sent: int
    received: int


def link_bytes() -> LinkBytes:
    """Of the node on which this process runs; for programs that the lab has started.

    Raises:
        OSError: the process does not run in a lab.
    """
    folder = Path("/sys/class/net", INTERFACE, "statistics")
    return LinkBytes(int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text()))


class Counters:
    """The counters of all nodes, read from outside and without a process for each reading."""

    def __init__(self, files: list[TextIO]) -> None:
        self._files = files

    def read(self) -> list[LinkBytes]:
        """By node."""
        for file in self._files:
            file.seek(0)
        return [parse(file.read()) for file in self._files]


@contextmanager
def open_counters(lab: Lab) -> Iterator[Counters]:
    """Open within this context, and no longer, since an open file keeps its namespace alive."""
    with ExitStack() as stack:
        yield Counters([stack.enter_context(opened_within(node.namespace)) for node in lab.nodes])


def opened_within(namespace: str) -> TextIO:
    """`/proc/net/dev` of another namespace: a file that is opened in a namespace goes on to show that one.

    Only the thread that opens it enters the namespace, and it ends there.
    """
    opened: list[TextIO] = []

    def enter_and_open() -> None:
        with (NETWORK_NAMESPACES / namespace).open() as handle:
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
        opened.append(Path("/proc/thread-self/net/dev").open())  # noqa: SIM115, whoever asked for it closes it

    thread = threading.Thread(target=enter_and_open)
    thread.start()
    thread.join()
    return opened[0]


def parse(table: str) -> LinkBytes:
    """The link's row of `/proc/net/dev`: eight figures of what was received, bytes first; then of what was sent."""
    (line,) = [line for line in table.splitlines() if line.strip().startswith(f"{INTERFACE}:")]
    figures = line.partition(":")[2].split()
    return LinkBytes(sent=int(figures[8]), received=int(figures[0]))


def write_sample(file: TextIO, counted: list[LinkBytes]) -> None:
    """A row a node of `COLUMNS`, now."""
    now = f"{time.time():.3f}"
    csv.writer(file).writerows((now, node, each.sent, each.received) for node, each in enumerate(counted))
    file.flush()
