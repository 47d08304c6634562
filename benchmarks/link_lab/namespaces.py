"""The network of a lab: a namespace a node and one for the switch; nothing touches the machine's own network."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.link_lab.shaping import shape
from benchmarks.link_lab.state import INTERFACE, Lab, all_labs, locked, plan
from benchmarks.link_lab.tools import RefusedError, ip, require_tools
from training.communication.rates import Rate
from training.errors import UserError

CONGESTION_CONTROL = "reno"
"""Of TCP, for all nodes: every kernel has it. A host's own default may be BBR, with which steps of small messages stand
still time and again (docs/findings.md, stops of 200 ms)."""
CHOOSE = f"open('/proc/sys/net/ipv4/tcp_congestion_control', 'w').write('{CONGESTION_CONTROL}')"
ENDING_S = 5.0
"""What processes get between SIGTERM and SIGKILL."""


@contextmanager
def lab_network(rates: list[Rate], mtu: int, delay: str | None, command: list[str]) -> Iterator[Lab]:
    """Within this context a lab's network is up: node k has `rates[k]`. At its end, however it ends, all is gone.

    Raises:
        UserError: it cannot be made.
    """
    require_tools()
    with locked():
        remove_leftovers()
        lab = plan(rates, mtu, delay, command, all_labs())
        refuse_foreign(lab)
        lab.save()  # before anything is made, so that whatever is made is known to be ours
        lab.logs.mkdir()
    try:
        build(lab)
        yield lab
    finally:
        with undisturbed(), locked():
            remove(lab)


def build(lab: Lab) -> None:
    for namespace in lab.namespaces:
        ip("netns", "add", namespace)
        ip("-n", namespace, "link", "set", "lo", "up")
    ip("-n", lab.switch, "link", "add", "switch", "type", "bridge")
    mtu = ("mtu", str(lab.mtu))
    for node in lab.nodes:
        ends = ("name", node.port, *mtu, "type", "veth", "peer", "name", INTERFACE, *mtu, "netns", node.namespace)
        ip("-n", lab.switch, "link", "add", *ends)
        ip("-n", lab.switch, "link", "set", node.port, "master", "switch", "up")
        ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", INTERFACE)
        ip("-n", node.namespace, "link", "set", INTERFACE, "up")
        control_congestion(node.namespace)
        shape(lab, node)
    ip("-n", lab.switch, "link", "set", "switch", *mtu, "up")


def control_congestion(namespace: str) -> None:
    """Where that is refused (before Linux 4.15, and in containers that may only read /proc/sys), the default stays."""
    try:
        ip("netns", "exec", namespace, sys.executable, "-c", CHOOSE)
    except RefusedError:
        print(
            f"link lab: {namespace} keeps this host's TCP congestion control, since {CONGESTION_CONTROL} was refused; "
            "with BBR, steps of small messages stand still time and again (docs/findings.md)",
            file=sys.stderr,
        )


def refuse_foreign(lab: Lab) -> None:
    """Raises:
    UserError: a namespace of a name that `lab` would take is there already, and so was made by something else.
    """
    there = {entry["name"] for entry in json.loads(ip("-json", "netns", "list") or "[]")}
    for namespace in lab.namespaces:
        if namespace in there:
            raise UserError(
                f"network namespace {namespace} exists, and no lab made it; if nobody needs it, run: "
                f"ip netns delete {namespace}"
            )


def remove_leftovers() -> None:
    """Remove what labs left whose process was killed; they alone are known by a state file."""
    for lab in all_labs():
        if not lab.is_alive:
            remove(lab)
            print(f"link lab: removed what lab {lab.number} of process {lab.owner[0]} had left behind", file=sys.stderr)


def remove(lab: Lab) -> None:
    """End what runs in its namespaces, and delete them and its state. Whatever of it is gone already may be gone."""
    end_processes(lab)
    for namespace in lab.namespaces:
        ip("netns", "delete", namespace, check=False)
    shutil.rmtree(lab.logs, ignore_errors=True)
    lab.path.unlink(missing_ok=True)


def end_processes(lab: Lab) -> None:
    """SIGTERM, so that `torchrun` ends its ranks, and after `ENDING_S` SIGKILL."""
    deadline = time.monotonic() + ENDING_S
    sent: set[int] = set()
    while pids := pids_in(lab):
        late = time.monotonic() > deadline
        for pid in pids if late else pids - sent:
            try:
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            except ProcessLookupError:
                continue
        sent |= pids
        time.sleep(0.05)


def pids_in(lab: Lab) -> set[int]:
    listed = (ip("netns", "pids", namespace, check=False) for namespace in lab.namespaces)
    return {int(pid) for lines in listed for pid in lines.split()}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that would end the process do nothing within this context."""
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
