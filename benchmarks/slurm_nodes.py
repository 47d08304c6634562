"""The nodes of the SLURM trial: a network namespace for each, joined by a bridge. The machine's own network stays."""

import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddp_lab.runtime.errors import UserError

PREFIX = "ddp-lab-slurm-"
SWITCH = f"{PREFIX}switch"
MTU = ("mtu", "9000")
LOCK = Path("/run/ddp-lab-slurm.lock")
"""Held while the nodes are there. Whoever holds it may remove what a killed trial has left."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDING_S = 5.0
"""What processes get between SIGTERM and SIGKILL."""


def why_no_nodes() -> str:
    """Why this machine cannot have them; empty if it can."""
    if platform.system() != "Linux":
        return f"network namespaces need Linux; this is {platform.system()}"
    if shutil.which("ip") is None:
        return "ip not found; install iproute2, e.g. apt-get install iproute2"
    return "" if os.geteuid() == 0 else "network namespaces need root; run it with sudo"


def ip(*arguments: str, check: bool = True) -> str:
    """What `ip` prints.

    Raises:
        UserError: it failed, unless `check` is false.
    """
    answer = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if check and answer.returncode:
        raise UserError(f"ip {' '.join(arguments)}: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    return answer.stdout


@contextmanager
def nodes(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Within this context the nodes are up: the address of each. However it ends, they and all their processes go.

    Raises:
        UserError: they cannot be made, or another trial has its own.
    """
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another SLURM trial runs on this machine ({LOCK})") from None
        remove()
        try:
            yield make(names)
        finally:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)  # a second Ctrl-C waits
            remove()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def make(names: Sequence[str]) -> dict[str, str]:
    """Raises:
    UserError: the kernel refuses.
    """
    addresses = {name: f"10.77.0.{100 + index}" for index, name in enumerate(names)}
    for namespace in (SWITCH, *(PREFIX + name for name in names)):
        ip("netns", "add", namespace)
        ip("-n", namespace, "link", "set", "lo", "up")
    ip("-n", SWITCH, "link", "add", "switch", "type", "bridge")
    for name, address in addresses.items():
        ends = ("name", name, *MTU, "type", "veth", "peer", "name", "link0", *MTU, "netns", PREFIX + name)
        ip("-n", SWITCH, "link", "add", *ends)
        ip("-n", SWITCH, "link", "set", name, "master", "switch", "up")
        ip("-n", PREFIX + name, "address", "add", f"{address}/24", "dev", "link0")
        ip("-n", PREFIX + name, "link", "set", "link0", "up")
    ip("-n", SWITCH, "link", "set", "switch", *MTU, "up")
    return addresses


def remove() -> None:
    """End what runs in the namespaces, and delete them. Parts that are gone already are no error."""
    namespaces = [entry["name"] for entry in json.loads(ip("-json", "netns", "list") or "[]")]
    namespaces = [name for name in namespaces if name.startswith(PREFIX)]
    deadline = time.monotonic() + ENDING_S
    while pids := [int(pid) for name in namespaces for pid in ip("netns", "pids", name, check=False).split()]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM)
            except ProcessLookupError:
                continue
        time.sleep(0.2)
    for name in namespaces:
        ip("netns", "delete", name, check=False)
