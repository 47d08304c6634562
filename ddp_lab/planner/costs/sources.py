"""Where the costs of a plan come from, and how far they may be off."""

from pathlib import Path

from ddp_lab.planner.contracts import Costs, OperatorCosts
from ddp_lab.planner.costs import record
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.costs.entries import table
from ddp_lab.planner.costs.links import LinkCosts

ROOFLINE_ERROR, RECORD_ERROR, LINK_ERROR = 0.2, 0.05, 0.3
"""Largest relative errors of the times of operators, by where they come from, and of collectives: assumptions."""


def costs_of(
    cluster: Cluster, precision: str, path: Path | None = None, contention: float | None = None, compiles: bool = False
) -> Costs:
    """Costs on a cluster, by tables or by a record.

    Args:
        precision: Of the steps that are planned.
        path: Of a record of operators.
        contention: As in `Costs`. Default: what the table assumes for such devices.
        compiles: Whether a compiler fuses operators of the model's blocks.

    Raises:
        UserError: the record cannot be read, or is of another device or precision.
    """
    device = cluster.device
    kind = table()["operators"][device.kind]
    if compiles and "fused" in kind:
        device = device.compiled(kind["fused"], kind["compiled_host_us"] * 1e-6)
    operators: OperatorCosts = device
    compute_error, host_s = ROOFLINE_ERROR, device.host_s
    of_operators = f"Operators: roofline of {device.name} ({device.source}); on memory: {device.on_memory}."
    if path:
        content = record.load(path)
        operators, compute_error = record.operator_costs(path, content, device, precision), RECORD_ERROR
        of_operators = f"Operators: as recorded in {path} ({content['hardware']}, {content['threads']} threads)."
        host_s = 0.0  # it is in the record
    of_links = [f"Link {link.name}: {link.source}." for link in (cluster.inside, cluster.between) if link]
    assumed = table()["contention"].get(device.kind, {"compute": 1.0, "source": "assumed on a CPU"})
    factor, source = (assumed["compute"], assumed["source"]) if contention is None else (contention, "as given")
    by_card = assumed["network_card"] / (assumed["compute"] - 1) if device.kind == "cuda" else 1.0
    slower = f"Contention: compute takes {factor:.2f} times as long beside collectives ({source})."
    sources = (of_operators, *of_links, slower)
    return Costs(operators, LinkCosts(cluster, by_card), factor, compute_error, sources, host_s)
