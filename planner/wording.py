"""What a reader must know of a plan besides its table, in sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.plan import Case, Outcome, Plan
from planner.recorded import RecordedCosts


def headline(case: Case) -> str:
    cluster, config = case.cluster, case.config
    nodes = f"{cluster.nodes} nodes of {cluster.ranks_per_node}" if cluster.nodes > 1 else f"{cluster.ranks_per_node}"
    between = f", {cluster.between.name} between nodes" if cluster.between and cluster.nodes > 1 else ""
    uneven = f", {case.longest} on the rank with the longest" if case.longest > case.sequence_length else ""
    samples = f"{case.sequence_length} tokens{uneven}" if case.model.kind == "tokens" else "224 x 224 pixels"
    return (
        f"PREDICTED, not measured: {case.model.name} ({case.model.elements() / 1e6:,.1f} M parameters) "
        f"on {nodes} x {cluster.device.name}, {cluster.inside.name}{between}.\nA global batch of "
        f"{config.global_batch_size} samples of {samples}: {config.grad_accum_steps} micro-batches of "
        f"{case.micro_batch_size} on each rank; {config.precision}."
    )


def remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the table could not say, each thing once."""
    by_remark: dict[str, list[str]] = {}
    for of_choice in rows:
        if of_choice["remark"]:
            by_remark.setdefault(str(of_choice["remark"]), []).append(str(of_choice["choice"]))
    return [f"{', '.join(names)}: {remark}" for remark, names in by_remark.items()]


def certainty(plan: Plan) -> list[str]:
    costs, is_cuda = plan.costs, plan.case.cluster.device.kind == "cuda"
    spare = (
        "of a device's memory, less 1 GiB for CUDA itself" if is_cuda else "of a rank's part of the machine's memory"
    )
    return [
        f"Intervals: operators off by {costs.compute_error:.0%} at most and collectives by {costs.link_error:.0%}. "
        f"To spare: {spare}.",
        *costs.sources,
        *([as_recorded(plan.outcomes, costs.record)] if costs.record else []),
    ]


def as_recorded(outcomes: Sequence[Outcome], record: RecordedCosts) -> str:
    """How much of the compute the record holds as it is, and where the rest is from: the least of all choices and the
    most."""
    shares: dict[str, list[float]] = {"recorded": [], "interpolated": [], "roofline": []}
    for simulated in (outcome.simulated for outcome in outcomes if outcome.simulated):
        seconds = dict.fromkeys(shares, 0.0)
        for span in simulated.spans:
            if span.lane == "compute":
                source = record.source_of(span.details["call"])
                seconds[source if source in shares else "roofline"] += span.end_s - span.start_s
        total = sum(seconds.values())
        for source, of_source in seconds.items():
            shares[source].append(of_source / total if total else 0.0)
    parts = {source: f"{min(parts, default=0):.1%} to {max(parts, default=0):.1%}" for source, parts in shares.items()}
    return (
        f"Of the compute of a step, by choice: {parts['recorded']} is of operators whose very shapes the record holds, "
        f"{parts['interpolated']} of operators that it holds in other shapes, {parts['roofline']} of others, by the "
        "rates that it reached."
    )
