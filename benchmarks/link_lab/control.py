"""What another terminal does to a running lab: change a rate, cut a link, restore it."""

from collections.abc import Callable

from benchmarks.link_lab import shaping
from benchmarks.link_lab.state import Lab, Node, all_labs, choose, locked
from benchmarks.link_lab.tools import require_tools
from training.communication.rates import Rate
from training.errors import UserError


def set_rate(rate: Rate, lab: int | None, node: int | None) -> str:
    """These three answer with a sentence on what was done.

    Args:
        lab: Its number; None for the only one.
        node: Its number; None for all nodes of the lab.

    Raises:
        UserError: there is no such lab or node, or the kernel refuses.
    """
    return change(lab, node, lambda chosen, each: shaping.set_rate(chosen, each, rate), f"carries {rate} each way")


def cut(lab: int | None, node: int | None) -> str:
    return change(lab, node, shaping.cut, "is cut")


def restore(lab: int | None, node: int | None) -> str:
    return change(lab, node, shaping.restore, "is whole")


def change(number: int | None, node: int | None, act: Callable[[Lab, Node], None], outcome: str) -> str:
    require_tools()
    with locked():
        lab = choose(number)
        nodes = lab.nodes if node is None else [each for each in lab.nodes if each.number == node]
        if not nodes:
            raise UserError(f"--node {node}: lab {lab.number} has nodes 0 to {len(lab.nodes) - 1}")
        for each in nodes:
            act(lab, each)
            lab.save()
    whose = "each node" if node is None else f"node {node}"
    return f"lab {lab.number}: the link of {whose} {outcome}"


def listing() -> str:
    """A line a lab, and one for each of its nodes."""
    lines = []
    for lab in all_labs():
        whose = f"of process {lab.owner[0]}" + ("" if lab.is_alive else ", which has ended: the next start removes it")
        lines.append(f"lab {lab.number} {whose}: {' '.join(lab.command)}")
        for node in lab.nodes:
            lines.append(f"  node {node.number} ({node.address}): {'cut' if node.is_cut else node.rate}")
    return "\n".join(lines) or "no lab is running"
