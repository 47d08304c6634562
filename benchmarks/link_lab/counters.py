"""The byte counters of a link's interface: what really went over the wire, headers and start-up traffic included."""

import ctypes
import os
import threading
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from benchmarks.link_lab.state import INTERFACE, Lab

NETWORK_NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000


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
    """Reads the counters of all nodes from outside, without a process for each reading."""

    def __init__(self, lab: Lab) -> None:
        self._files = [opened_within(node.namespace) for node in lab.nodes]

    def read(self) -> list[LinkBytes]:
        """By node."""
        return [parse(reread(file)) for file in self._files]

    def close(self) -> None:
        """An open file keeps its namespace alive."""
        for file in self._files:
            file.close()


def opened_within(namespace: str) -> TextIOWrapper:
    """`/proc/net/dev` of another namespace: a file that is opened in a namespace goes on to show that one.

    Only the thread that opens it enters the namespace, and it ends there.
    """
    opened: list[TextIOWrapper] = []

    def enter_and_open() -> None:
        with (NETWORK_NAMESPACES / namespace).open() as handle:
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
        opened.append(Path("/proc/thread-self/net/dev").open())

    thread = threading.Thread(target=enter_and_open)
    thread.start()
    thread.join()
    return opened[0]


def reread(file: TextIOWrapper) -> str:
    file.seek(0)
    return file.read()


def parse(table: str) -> LinkBytes:
    """Of `/proc/net/dev`: after the name come eight figures of what was received, the first of them bytes, and then of
    what was sent."""
    (line,) = [line for line in table.splitlines() if line.strip().startswith(f"{INTERFACE}:")]
    figures = line.partition(":")[2].split()
    return LinkBytes(sent=int(figures[8]), received=int(figures[0]))
