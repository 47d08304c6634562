"""How fast a link is, and whether it is up. `tc` and `ip` change both, also while a job runs.

A token bucket (`tbf`) at each end of a link limits what its node sends and what it receives. The sender's bucket holds
what the link carries in two milliseconds, because the kernel may send that late, and at least one of the 64 KiB packets
that TCP sends at once. The receiver's bucket is twice as large. Two equal buckets in a row would lose some of the rate
whenever one of them is late.
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence

from benchmarks.link_lab.state import INTERFACE, Lab, Node
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.rates import Rate

BUCKET_S = 0.002
LEAST_BUCKET_BYTES = 72 * 1024
RECEIVER_BUCKETS = 2
LONGEST_QUEUE = "50ms"
"""Packets that wait longer are dropped, as in a switch whose buffer is full."""


class RefusedError(UserError):
    """`ip` or `tc` refused. `reason` is what it printed, without the command."""

    def __init__(self, command: Sequence[str], reason: str) -> None:
        super().__init__(f"{' '.join(command)}: {reason}")
        self.reason = reason


def require_tools() -> None:
    """Raises:
    UserError: this is not Linux, not root, or iproute2 is missing.
    """
    if platform.system() != "Linux":
        raise UserError(f"the link lab needs Linux's network namespaces; this is {platform.system()}")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise UserError(f"the link lab needs {' and '.join(missing)}; install iproute2, e.g. apt-get install iproute2")
    if os.geteuid() != 0:
        raise UserError("the link lab makes network namespaces, for which it must be root; run it with sudo")


def run_tool(*command: str, check: bool = True) -> str:
    """What `ip` or `tc` prints.

    Raises:
        RefusedError: it failed, unless `check` is false.
    """
    answer = subprocess.run(command, capture_output=True, text=True)
    if check and answer.returncode:
        reason = " ".join(answer.stderr.partition("Usage:")[0].split())
        raise RefusedError(command, reason or f"exit code {answer.returncode}")
    return answer.stdout


def shape(lab: Lab, node: Node) -> None:
    """Give both directions of a node's link its rate, and what the node sends the lab's delay.

    Raises:
        UserError: the kernel refuses.
    """
    rate = Rate.parse(node.rate)
    limit(node.namespace, INTERFACE, rate, 1, lab.delay)
    limit(lab.switch, node.port, rate, RECEIVER_BUCKETS, None)


def limit(namespace: str, interface: str, rate: Rate, buckets: int, delay: str | None) -> None:
    """Limit what goes out of an interface.

    Raises:
        UserError: the kernel refuses.
    """
    place = ("tc", "-n", namespace, "qdisc", "replace", "dev", interface)
    parent: tuple[str, ...] = ("root",)
    if rate.bits_per_s is None:
        run_tool("tc", "-n", namespace, "qdisc", "delete", "dev", interface, "root", check=False)  # there may be none
    else:
        bucket = buckets * max(LEAST_BUCKET_BYTES, round(rate.bits_per_s / 8 * BUCKET_S))
        tbf = ("tbf", "rate", f"{rate.bits_per_s}bit", "burst", f"{bucket}b", "latency", LONGEST_QUEUE)
        set_queue(f"rate {rate}", *place, "root", "handle", "1:", *tbf)
        parent = ("parent", "1:1")
    if delay:
        set_queue(f"--delay {delay}", *place, *parent, "handle", "10:", "netem", "delay", delay, "limit", "100000")


def set_queue(setting: str, *command: str) -> None:
    """Run `tc`.

    Raises:
        UserError: `tc` or the kernel refuses; the message names the user's `setting`.
    """
    try:
        run_tool(*command)
    except RefusedError as error:
        if "qdisc kind is unknown" in error.reason:
            kind = "netem" if "netem" in command else "tbf"
            raise UserError(f"{setting}: this kernel has no {kind}; try modprobe sch_{kind}, or do without") from error
        raise UserError(f"{setting}: refused by tc or the kernel: {error.reason}") from error


def set_rate(lab: Lab, node: Node, rate: Rate) -> None:
    before, node.rate = node.rate, str(rate)
    try:
        shape(lab, node)
    except UserError:
        node.rate = before
        shape(lab, node)
        raise


def cut(lab: Lab, node: Node) -> None:
    """Take the link down at the switch: the node's interface loses its carrier."""
    run_tool("ip", "-n", lab.switch, "link", "set", node.port, "down")
    node.is_cut = True


def restore(lab: Lab, node: Node) -> None:
    run_tool("ip", "-n", lab.switch, "link", "set", node.port, "up")
    node.is_cut = False


def unreachable(lab: Lab) -> list[Node]:
    """The nodes whose link is down at either end."""
    links = json.loads(run_tool("ip", "-json", "-n", lab.switch, "link", "show"))
    up = {link["ifname"] for link in links if link["operstate"] == "UP"}
    return [node for node in lab.nodes if node.port not in up]
