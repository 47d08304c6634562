"""The network of a lab: one namespace for each node and one for the switch. The machine's own stays as it is."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.link_lab.shaping import RefusedError, require_tools, run_tool, shape
from benchmarks.link_lab.state import INTERFACE, Lab, all_labs, locked, plan
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.rates import Rate

CONGESTION_CONTROL = "reno"
"""Of TCP on all nodes; every kernel has it. A host's default may be BBR, with which steps of small messages stop for
200 ms again and again (docs/findings.md)."""
SET_CONTROL = f"open('/proc/sys/net/ipv4/tcp_congestion_control', 'w').write('{CONGESTION_CONTROL}')"
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDING_S = 5.0
"""What processes get between SIGTERM and SIGKILL."""


@contextmanager
def lab_network(rates: list[Rate], mtu: int, delay: str | None, command: list[str]) -> Iterator[Lab]:
    """Within this context a lab's network is up: node k has `rates[k]`. However the context ends, all is removed.

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
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)  # a second Ctrl-C waits
        with locked():
            remove(lab)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def ip(*arguments: str) -> str:
    return run_tool("ip", *arguments)


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
        set_congestion_control(node.namespace)
        shape(lab, node)
    ip("-n", lab.switch, "link", "set", "switch", *mtu, "up")


def set_congestion_control(namespace: str) -> None:
    """The host's default stays where this is refused: before Linux 4.15, and where /proc/sys is read-only."""
    try:
        ip("netns", "exec", namespace, sys.executable, "-c", SET_CONTROL)
    except RefusedError:
        print(
            f"link lab: {namespace} keeps this host's TCP congestion control, since {CONGESTION_CONTROL} was refused; "
            "with BBR, steps of small messages stop for 200 ms again and again (docs/findings.md)",
            file=sys.stderr,
        )


def refuse_foreign(lab: Lab) -> None:
    """Raises:
    UserError: a namespace that `lab` would make exists already, so something else has made it.
    """
    existing = {entry["name"] for entry in json.loads(ip("-json", "netns", "list") or "[]")}
    for namespace in lab.namespaces:
        if namespace in existing:
            raise UserError(
                f"network namespace {namespace} exists, and no lab made it; if nobody needs it, run: "
                f"ip netns delete {namespace}"
            )


def remove_leftovers() -> None:
    """Remove the labs whose process was killed. Their state files tell which ones these are."""
    for lab in all_labs():
        if not lab.is_alive:
            remove(lab)
            print(f"link lab: removed what lab {lab.number} of process {lab.owner[0]} had left behind", file=sys.stderr)


def remove(lab: Lab) -> None:
    """End what runs in its namespaces, and delete them and its state. Parts that are gone already are no error."""
    end_processes(lab)
    for namespace in lab.namespaces:
        run_tool("ip", "netns", "delete", namespace, check=False)
    shutil.rmtree(lab.logs, ignore_errors=True)
    lab.path.unlink(missing_ok=True)


def end_processes(lab: Lab) -> None:
    """Send SIGTERM, so that `torchrun` ends its ranks, and after `ENDING_S` SIGKILL."""
    deadline = time.monotonic() + ENDING_S
    sent: set[int] = set()
    while pids := pids_in(lab):
        is_late = time.monotonic() > deadline
        for pid in pids if is_late else pids - sent:
            try:
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            except ProcessLookupError:
                continue
        sent |= pids
        time.sleep(0.05)


def pids_in(lab: Lab) -> set[int]:
    listed = (run_tool("ip", "netns", "pids", namespace, check=False) for namespace in lab.namespaces)
    return {int(pid) for lines in listed for pid in lines.split()}
