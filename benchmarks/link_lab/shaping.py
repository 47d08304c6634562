"""How fast a link is, and whether it is whole: changed with `tc` and `ip`, while a job runs too.

A token bucket (`tbf`) at each end of a link limits what its node sends, and what it receives. The sender's bucket holds
what the link carries in two milliseconds, since the kernel may come that late to send more, and at least one of the
64 KiB packets that TCP hands over at once. The receiver's is twice as large, so that between equal links it does not
bite: two equal buckets in a row would lose a little more whenever one of them is late.
"""

import json

from benchmarks.link_lab.state import INTERFACE, Lab, Node
from benchmarks.link_lab.tools import RefusedError, ip, tc
from training.communication.rates import Rate
from training.errors import UserError

BUCKET_S = 0.002
LEAST_BUCKET_BYTES = 72 * 1024
RECEIVER_BUCKETS = 2
LONGEST_QUEUE = "50ms"
"""What waits longer is dropped, as a switch does whose buffer is full."""


def shape(lab: Lab, node: Node) -> None:
    """Give both directions of a node's link its rate, and what it sends the lab's delay.

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
    place = ("-n", namespace, "qdisc", "replace", "dev", interface)
    parent: tuple[str, ...] = ("root",)
    if rate.bits_per_s is None:
        tc("-n", namespace, "qdisc", "delete", "dev", interface, "root", check=False)  # there may be none
    else:
        bucket = buckets * max(LEAST_BUCKET_BYTES, round(rate.bits_per_s / 8 * BUCKET_S))
        tbf = ("tbf", "rate", f"{rate.bits_per_s}bit", "burst", f"{bucket}b", "latency", LONGEST_QUEUE)
        asked(f"rate {rate}", *place, "root", "handle", "1:", *tbf)
        parent = ("parent", "1:1")
    if delay:
        asked(f"--delay {delay}", *place, *parent, "handle", "10:", "netem", "delay", delay, "limit", "100000")


def asked(what: str, *command: str) -> None:
    """Raises:
    UserError: `tc` or the kernel refuses; names `what` the user asked for.
    """
    try:
        tc(*command)
    except RefusedError as error:
        if "qdisc kind is unknown" in error.said:
            kind = "netem" if "netem" in command else "tbf"
            raise UserError(f"{what}: this kernel has no {kind}; try modprobe sch_{kind}, or do without") from error
        raise UserError(f"{what}: refused by tc or the kernel: {error.said}") from error


def set_rate(lab: Lab, node: Node, rate: Rate) -> None:
    before, node.rate = node.rate, str(rate)
    try:
        shape(lab, node)
    except UserError:
        node.rate = before
        shape(lab, node)
        raise


def cut(lab: Lab, node: Node) -> None:
    """Pull the plug at the switch: the node's interface loses its carrier."""
    ip("-n", lab.switch, "link", "set", node.port, "down")
    node.is_cut = True


def restore(lab: Lab, node: Node) -> None:
    ip("-n", lab.switch, "link", "set", node.port, "up")
    node.is_cut = False


def unreachable(lab: Lab) -> list[Node]:
    """The nodes whose link is down at either end."""
    ports = {port["ifname"]: port["operstate"] for port in json.loads(ip("-json", "-n", lab.switch, "link", "show"))}
    return [node for node in lab.nodes if ports.get(node.port) != "UP"]
