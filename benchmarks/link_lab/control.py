"""What another terminal does to a running lab: change a rate, cut a link, restore it, list the labs."""

from collections.abc import Callable

from benchmarks.link_lab import shaping
from benchmarks.link_lab.state import Lab, Node, all_labs, choose, locked
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.rates import Rate


def change(action: str, number: int | None, node: int | None, rate: Rate | None = None) -> str:
    """Change links of a lab; a sentence on what was done.

    Args:
        action: `set-rate` (to `rate`), `cut` or `restore`.
        number: Of the lab; None for the only one.
        node: Its number; None for all nodes of the lab.

    Raises:
        UserError: there is no such lab or node, or the kernel refuses.
    """
    actions: dict[str, tuple[Callable[[Lab, Node], None], str]] = {
        "set-rate": (lambda lab, node: shaping.set_rate(lab, node, rate or Rate(None)), f"carries {rate} each way"),
        "cut": (shaping.cut, "is cut"),
        "restore": (shaping.restore, "is whole"),
    }
    apply, outcome = actions[action]
    shaping.require_tools()
    with locked():
        lab = choose(number)
        nodes = [each for each in lab.nodes if node in (None, each.number)]
        if not nodes:
            raise UserError(f"--node {node}: lab {lab.number} has nodes 0 to {len(lab.nodes) - 1}")
        for each in nodes:
            apply(lab, each)
            lab.save()
    return f"lab {lab.number}: the link of {'each node' if node is None else f'node {node}'} {outcome}"


def listing() -> str:
    """One line for each lab, and one for each of its nodes."""
    lines = []
    for lab in all_labs():
        ended = "" if lab.is_alive else ", which has ended: the next start removes it"
        lines.append(f"lab {lab.number} of process {lab.owner[0]}{ended}: {' '.join(lab.command)}")
        lines += [f"  node {node.number} ({node.address}): {'cut' if node.is_cut else node.rate}" for node in lab.nodes]
    return "\n".join(lines) or "no lab is running"
