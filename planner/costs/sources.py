"""Where the costs of a plan come from, and how far they may be off."""

from dataclasses import dataclass
from pathlib import Path

from planner.contracts import CollectiveCosts, OperatorCosts
from planner.costs import hardware, record
from planner.costs.cluster import Cluster
from planner.costs.links import LinkCosts
from planner.costs.roofline import roofline
from training.errors import UserError

ROOFLINE_ERROR, RECORD_ERROR = 0.2, 0.05
LINK_ERROR = 0.3
"""Largest relative errors of the times of operators and of collectives, by where they come from. These are assumptions.
A record that states a larger error of its own counts with that."""


@dataclass(frozen=True)
class Knowledge:
    """What is known of devices and links besides the tables.

    Attributes:
        record: File of `scripts/plan.py record`.
        contention: How many times as long compute takes beside collectives, at least 1; None: what the table assumes.
        efficiency: Part of peak rates that operators reach if there is no record; None: what the table assumes.
    """

    record: Path | None = None
    contention: float | None = None
    efficiency: float | None = None


@dataclass(frozen=True)
class Costs:
    """What operators and collectives take, and how far that may be off.

    Attributes:
        contention: How many times as long compute takes while a collective is in flight.
        compute_error: Largest relative error of the time of operators.
        link_error: The same of collectives.
        sources: Where the figures come from, a sentence each.
    """

    operators: OperatorCosts
    collectives: CollectiveCosts
    contention: float
    compute_error: float
    link_error: float
    sources: tuple[str, ...] = ()


def costs_of(known: Knowledge, cluster: Cluster, precision: str) -> Costs:
    """A record where `known` names one, tables otherwise.

    Raises:
        UserError: the record cannot be read, or is of another device or precision.
    """
    device, sources = cluster.device, []
    operators: OperatorCosts
    if known.record:
        if known.efficiency is not None:
            raise UserError("--efficiency is for rates of a table; it does not go with --record")
        content = record.load(known.record)
        operators = record.operator_costs(known.record, content, device, precision)
        stated = record.stated_error(content)
        sources.append(
            f"Operators: as recorded in {known.record} ({content['hardware']}, {content['threads']} threads), which is "
            f"{stated:.0%} off in steps that it was not made from."
        )
        compute_error = max(RECORD_ERROR, stated)
    else:
        operators, compute_error = roofline(device, known.efficiency), ROOFLINE_ERROR
        assumed = "assumed" if known.efficiency is None else f"set to {known.efficiency:.0%}"
        sources.append(f"Operators: roofline of {device.name}, efficiency {assumed} ({device.source}).")
    sources += [f"Link {link.name}: {link.source}." for link in (cluster.inside, cluster.between) if link]
    contention, source = hardware.contention(device)
    if known.contention is not None:
        contention, source = known.contention, "as given"
    if source:
        sources.append(f"Contention: compute takes {contention:.2f} times as long beside collectives ({source}).")
    return Costs(operators, LinkCosts(cluster), contention, compute_error, LINK_ERROR, tuple(sources))
