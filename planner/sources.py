"""Where the costs of operators and collectives are taken from, and how far they may be off."""

from planner import collective_costs, costs
from planner.contracts import Contention
from planner.plan import Case, Costs

ROOFLINE_ERROR, LINK_TABLE_ERROR = 0.2, 0.3
"""What operators and collectives from tables alone are taken to be off by at most; nothing of that is measured here."""


def costs_of(case: Case) -> Costs:
    """A roofline and a table of links."""
    device = case.cluster.device
    return Costs(
        costs.roofline(device, precision=case.config.precision),
        collective_costs.from_links(case.cluster),
        Contention(),
        compute_error=ROOFLINE_ERROR,
        link_error=LINK_TABLE_ERROR,
        sources=(
            f"Operators: roofline of {device.name} ({device.source}).",
            *(f"Link {link.name}: {link.source}." for link in (case.cluster.inside, case.cluster.between) if link),
        ),
    )
