"""Where the costs of a plan come from, and how far they may be off."""

from pathlib import Path

from ddp_lab.planner.contracts import Costs, OperatorCosts
from ddp_lab.planner.costs import hardware, record
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.costs.links import LinkCosts

ROOFLINE_ERROR, RECORD_ERROR, LINK_ERROR = 0.2, 0.05, 0.3
"""Largest relative errors of the times of operators, by where they come from, and of collectives: assumptions."""


def costs_of(cluster: Cluster, precision: str, path: Path | None = None, contention: float | None = None) -> Costs:
    """Costs on a cluster, by tables or by a record.

    Args:
        precision: Of the steps that are planned.
        path: Of a record of operators.
        contention: As in `Costs`. Default: what the table assumes for such devices.

    Raises:
        UserError: the record cannot be read, or is of another device or precision.
    """
    operators: OperatorCosts = cluster.device
    compute_error = ROOFLINE_ERROR
    of_operators = f"Operators: roofline of {cluster.device.name} ({cluster.device.source})."
    if path:
        content = record.load(path)
        operators, compute_error = record.operator_costs(path, content, cluster.device, precision), RECORD_ERROR
        of_operators = f"Operators: as recorded in {path} ({content['hardware']}, {content['threads']} threads)."
    of_links = [f"Link {link.name}: {link.source}." for link in (cluster.inside, cluster.between) if link]
    assumed = hardware.table()["contention"].get(cluster.device.kind, {"compute": 1.0, "source": "assumed on a CPU"})
    factor, source = (assumed["compute"], assumed["source"]) if contention is None else (contention, "as given")
    slower = f"Contention: compute takes {factor:.2f} times as long beside collectives ({source})."
    sources = (of_operators, *of_links, slower)
    return Costs(operators, LinkCosts(cluster), factor, compute_error, sources)
