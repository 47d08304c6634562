"""Where the costs of a plan come from, and how far they may be off."""

from ddp_lab.planner.contracts import Costs
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.costs.entries import table
from ddp_lab.planner.costs.links import LinkCosts

OPERATOR_ERROR, LINK_ERROR = 0.2, 0.3
"""Largest relative errors of the times of operators and of collectives: assumptions."""


def costs_of(cluster: Cluster, contention: float | None = None, compiles: bool = False) -> Costs:
    """Costs on a cluster, by the table or by a card's file.

    Args:
        contention: As in `Costs`. Default: what the table assumes for such devices.
        compiles: Whether a compiler fuses operators of the model's blocks.
    """
    device = cluster.device
    kind = table()["operators"][device.kind]
    if compiles and "fused" in kind:
        device = device.compiled(kind["fused"], kind["compiled_host_us"] * 1e-6)
    of_operators = f"Operators: roofline of {device.name} ({device.source}); on memory: {device.on_memory}."
    of_links = [f"Link {link.name}: {link.source}." for link in (cluster.inside, cluster.between) if link]
    assumed = table()["contention"].get(device.kind, {"compute": 1.0, "source": "assumed on a CPU"})
    factor, source = (assumed["compute"], assumed["source"]) if contention is None else (contention, "as given")
    by_card = assumed["network_card"] / (assumed["compute"] - 1) if device.kind == "cuda" else 1.0
    slower = f"Contention: compute takes {factor:.2f} times as long beside collectives ({source})."
    sources = (of_operators, *of_links, slower)
    return Costs(device, LinkCosts(cluster, by_card), factor, OPERATOR_ERROR, sources, device.host_s)
