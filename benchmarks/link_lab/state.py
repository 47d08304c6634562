"""What is known of each lab on this machine, in one file for each lab: its process and its nodes."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.rates import Rate

FOLDER = Path("/run/ddp-link-lab")
PREFIX = "ddp-lab"
INTERFACE = "link0"
"""The name of each node's one interface, within its namespace."""


@dataclass
class Node:
    """One node: its namespace, its address, and how its link is now."""

    number: int
    namespace: str
    address: str
    rate: str
    is_cut: bool = False

    @property
    def port(self) -> str:
        """The other end of its link, in the switch's namespace."""
        return f"node{self.number}"


@dataclass
class Lab:
    """One lab. `owner` is the process that runs it: its id and its start time, because ids are used again."""

    number: int
    owner: tuple[int, int]
    switch: str
    nodes: list[Node]
    mtu: int
    delay: str | None
    command: list[str]

    @property
    def namespaces(self) -> list[str]:
        return [self.switch, *(node.namespace for node in self.nodes)]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.number}.json"

    @property
    def logs(self) -> Path:
        """A folder for what the job writes to standard error."""
        return FOLDER / f"{self.number}.logs"

    @property
    def is_alive(self) -> bool:
        pid, started = self.owner
        return start_of(pid) == started

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(self))
        partial.rename(self.path)

    def reload(self) -> "Lab":
        return msgspec.json.decode(self.path.read_bytes(), type=Lab)


def plan(rates: list[Rate], mtu: int, delay: str | None, command: list[str], labs: list[Lab]) -> Lab:
    """A lab of this process, under a number that none of `labs` has. Nothing is made yet.

    All addresses have the same number of digits, because `torchrun` sorts nodes by address as text.
    """
    number = min(set(range(len(labs) + 1)) - {lab.number for lab in labs})
    started = start_of(os.getpid())
    assert started is not None
    nodes = [
        Node(index, f"{PREFIX}-{number}-node{index}", f"10.77.0.{100 + index}", str(rate))
        for index, rate in enumerate(rates)
    ]
    return Lab(number, (os.getpid(), started), f"{PREFIX}-{number}-switch", nodes, mtu, delay, command)


def start_of(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def all_labs() -> list[Lab]:
    """Those that run, and those whose process was killed."""
    return [msgspec.json.decode(path.read_bytes(), type=Lab) for path in sorted(FOLDER.glob("*.json"))]


@contextmanager
def locked() -> Iterator[None]:
    """A lab is made, changed and removed under this lock.

    Raises:
        UserError: the folder of states cannot be written to.
    """
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        file = (FOLDER / "lock").open("w")
    except OSError as error:
        raise UserError(f"{FOLDER}: cannot write there: {error.strerror}; the link lab needs root") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def choose(number: int | None) -> Lab:
    """The running lab with this number, or the only one.

    Raises:
        UserError: there is no such lab, or there are several.
    """
    running = {lab.number: lab for lab in all_labs() if lab.is_alive}
    if not running:
        raise UserError("no lab is running; start one with link_lab.py --nodes 2 --rate 1gbit -- COMMAND")
    names = ", ".join(map(str, running))
    if number is None and len(running) > 1:
        raise UserError(f"several labs are running: {names}; name one with --lab")
    if number is not None and number not in running:
        raise UserError(f"--lab {number}: no such lab; running: {names}")
    return running[min(running) if number is None else number]
