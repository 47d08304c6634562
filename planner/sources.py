"""Where the costs of operators and collectives are taken from, and how far they may be off."""

from pathlib import Path

from planner import collective_costs, collective_fits, costs, hardware
from planner.cluster import Cluster
from planner.contention import load as load_contention
from planner.contracts import CollectiveCosts, ContentionBySize, OperatorCosts
from planner.plan import Case, Costs
from planner.recorded import RecordedCosts, stated_error
from planner.recorded import load as load_record
from training.errors import UserError

ROOFLINE_ERROR, RECORD_ERROR = 0.2, 0.05
LINK_TABLE_ERROR, FITS_ERROR = 0.3, 0.1
"""What the times of operators and of collectives are taken to be off by at most, by where they are from; a record that
says itself that it is further off counts as that. These are assumptions, from which intervals follow; `docs/planner.md`
says what was measured."""


def costs_of(case: Case) -> Costs:
    """Records where the command line names some, tables otherwise.

    Raises:
        UserError: a record cannot be read, or is of another device, precision or cluster.
    """
    known, cluster = case.knowledge, case.cluster
    device, precision = cluster.device, case.config.precision
    sources: list[str] = []
    record: RecordedCosts | None = None
    if known.record and known.efficiency is not None:
        raise UserError("--efficiency is for rates of a table; it does not go with --record")
    if known.record:
        recorded = costs.recorded(known.record, device, precision, known.rescale)
        stated = stated_error(load_record(known.record))
        sources += [
            f"Operators: as recorded in {known.record}, which is {stated:.0%} off in steps that it was not made from.",
            *(f"{remark}." for remark in recorded.remarks),
        ]
        compute_error = max(ROOFLINE_ERROR if recorded.remarks else RECORD_ERROR, stated)
        operators: OperatorCosts = recorded
        record = recorded.costs if isinstance(recorded, costs.Rescaled) else recorded
    else:
        operators = costs.roofline(device, known.efficiency)
        assumed = "assumed" if known.efficiency is None else f"set to {known.efficiency:.0%}"
        sources.append(f"Operators: roofline of {device.name}, efficiency {assumed} ({device.source}).")
        compute_error = ROOFLINE_ERROR
    if known.straggler > 1:
        operators = costs.Scaled(operators, known.straggler)
        sources.append(f"One rank computes {known.straggler:g} times as long as the others, and all wait for it.")
    if known.collectives:
        fitted = collective_fits.from_fits(known.collectives, cluster, known.rescale)
        sources += [f"Collectives: as measured in {known.collectives}.", *(f"{remark}." for remark in fitted.remarks)]
        link_error = FITS_ERROR if not fitted.remarks else LINK_TABLE_ERROR
        collectives: CollectiveCosts = fitted
    else:
        collectives = collective_costs.from_links(cluster)
        sources += [f"Link {link.name}: {link.source}." for link in (cluster.inside, cluster.between) if link]
        link_error = LINK_TABLE_ERROR
    contention, of_contention = contention_of(known.contention, cluster)
    sources += [of_contention] if of_contention else []
    return Costs(operators, collectives, contention, compute_error, link_error, tuple(sources), record)


def contention_of(path: Path | None, cluster: Cluster) -> tuple[ContentionBySize, str]:
    """What compute and collectives take from each other, as measured or else as the table assumes, and a sentence that
    says so."""
    if path is None:
        assumed, source = hardware.contention(cluster.device)
        sentence = f"Contention: compute takes {assumed.compute:.2f} times as long beside collectives ({source})."
        return assumed, sentence if source else ""
    measured = load_contention(path, cluster)
    least, most = measured.beside(0.0), measured.beside(float("inf"))
    return measured, (
        f"Contention: compute takes {least.compute:.2f} times as long beside the smallest collectives and "
        f"{most.compute:.2f} beside the largest, and those {least.communication:.2f} and {most.communication:.2f} "
        f"times, by {path}."
    )
