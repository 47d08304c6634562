"""How fast a link is, and whether it is whole: changed with `tc` and `ip`, while a job runs too.

A token bucket (`tbf`) at each end of a link limits what its node sends, and what it receives. The bucket holds what the
link carries in a millisecond, since the kernel may come that late to send more, and at least two of the 64 KiB packets
that TCP hands over at once.
"""

import json

from benchmarks.link_lab.rates import Rate
from benchmarks.link_lab.state import INTERFACE, Lab, Node
from benchmarks.link_lab.tools import ip, tc
from training.errors import UserError

BUCKET_S = 0.001
LEAST_BUCKET_BYTES = 2 * 65536
LONGEST_QUEUE = "50ms"
"""What waits longer is dropped, as a switch does whose buffer is full."""


def shape(lab: Lab, node: Node) -> None:
    """Give both directions of a node's link its rate, and what it sends the lab's delay.

    Raises:
        UserError: the kernel refuses.
    """
    rate = Rate.parse(node.rate)
    for namespace, interface in ((lab.switch, node.port), (node.namespace, INTERFACE)):
        delay = lab.delay if interface == INTERFACE else None
        limit(namespace, interface, rate, delay)


def limit(namespace: str, interface: str, rate: Rate, delay: str | None) -> None:
    place = ("-n", namespace, "qdisc", "replace", "dev", interface)
    if rate.bits_per_s is None:
        tc("-n", namespace, "qdisc", "delete", "dev", interface, "root", check=False)  # there may be none
        parent = ("root",)
    else:
        bucket = max(LEAST_BUCKET_BYTES, round(rate.bits_per_s / 8 * BUCKET_S))
        tbf = ("tbf", "rate", f"{rate.bits_per_s}bit", "burst", f"{bucket}b", "latency", LONGEST_QUEUE)
        asked(f"rate {rate}", *place, "root", "handle", "1:", *tbf)
        parent = ("parent", "1:1")
    if delay:
        netem = ("netem", "delay", delay, "limit", "100000")
        asked(f"--delay {delay}", *place, *parent, "handle", "10:", *netem)


def asked(what: str, *command: str) -> None:
    """Raises:
    UserError: `tc` or the kernel refuses; names `what` the user asked for.
    """
    try:
        tc(*command)
    except UserError as error:
        said = str(error).partition(": ")[2]
        hint = ""
        if "qdisc kind is unknown" in said:
            kind = "netem" if "netem" in command else "tbf"
            hint = f": it has no {kind}; try modprobe sch_{kind}"
        raise UserError(f"{what}: the kernel or tc refuses it ({said}){hint}") from error


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
