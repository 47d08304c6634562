"""Settings beside those of a plan, simulated after it: what would make a choice fit, and what would make the best one
faster."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ddp_lab.planner.choices import choices
from ddp_lab.planner.costs.sources import costs_of
from ddp_lab.planner.plan import Case, Outcome, Task, outcomes, told
from ddp_lab.planner.report.recommendation import Row, gib, recommended, total
from ddp_lab.planner.report.table import Plan, rates
from ddp_lab.runtime.errors import UserError, listed
from ddp_lab.runtime.settings.data import CAUSAL_LM
from ddp_lab.strategy.options import BLOCK, NO_RECOMPUTATION, SELECTIVE

LEANEST = "zero3"
MORE_DEVICES = (2, 4, 8)
CHUNKS = 8
"""Parts of the loss that are tried where a plan computes it whole."""
Variant = tuple[str, Task]
"""What is other than in the plan, and the choice under such settings."""


def besides(plan: Plan, jobs: int | None) -> list[str]:
    """Sentences on the choice that comes nearest to fitting, and on what the recommended one gives up."""
    best = recommended(plan.rows)
    too_large = [row for row in plan.rows if row["fits"] == "no"]
    nearest = min(too_large, key=lambda row: row["peak_bytes"], default=None)
    remedies = [] if nearest is None else list(smaller(plan.case_of(nearest.get("mesh")), str(nearest["choice"])))
    if nearest is not None and best is not None:
        remedies = [(words, task) for words, task in remedies if task[1] == nearest["choice"]]
    hints = [] if best is None else list(faster(plan.case_of(best.get("mesh")), str(best["choice"])))
    variants = [*remedies, *hints]
    if not variants:
        return []
    of = "variant" if len(variants) == 1 else "variants"
    found = told(partial(outcomes, jobs=jobs), [task for _, task in variants], of, [words for words, _ in variants])
    sentences = []
    if nearest is not None and remedies:
        sentences.append(what_fits(nearest, remedies, found[: len(remedies)]))
    if best is not None:
        sentences += what_is_faster(best, hints, found[len(remedies) :])
    return sentences


def smaller(case: Case, choice: str) -> Iterator[Variant]:
    """What needs less memory, one change at a time, and two at once. Changes that make no sense are left out."""
    config, micro = case.config, case.micro_batch_size
    accumulation = {"grad_accum_steps": config.grad_accum_steps * micro} if micro > 1 else {}
    alone = f"--grad-accum-steps {config.grad_accum_steps * micro} (a micro-batch of 1)"
    changes: list[tuple[str, dict[str, Any]]] = [(alone, accumulation)] if accumulation else []
    if config.strategy.activation_checkpointing == NO_RECOMPUTATION:
        kept = [(f"--activation-checkpointing {blocks}", blocks) for blocks in (SELECTIVE, BLOCK)]
        changes += [(words, {"activation_checkpointing": blocks}) for words, blocks in kept]
        if accumulation:
            changes.append((f"{kept[-1][0]} and {alone}", {"activation_checkpointing": BLOCK, **accumulation}))
    if case.model.task == CAUSAL_LM and config.strategy.loss_chunks == 1:
        changes.append((f"--loss-chunks {CHUNKS}", {"loss_chunks": CHUNKS}))
    for words, settings in changes:
        try:
            yield words, (replace(case, config=config.but(**settings)), choice)
        except UserError:
            continue
    if choice != LEANEST and LEANEST in choices(None, [case.mesh]):
        yield LEANEST, (case, LEANEST)
    if case.mesh is None:
        for factor in MORE_DEVICES:
            cluster = case.cluster
            nodes, ranks = cluster.nodes, cluster.ranks_per_node * factor
            if ranks > 8:
                nodes, ranks = nodes * factor, cluster.ranks_per_node
            larger = replace(cluster, nodes=nodes, ranks_per_node=ranks, between=cluster.between or cluster.inside)
            more = replace(case, cluster=larger)
            if config.global_batch_size % (config.grad_accum_steps * larger.world_size) == 0:
                yield f"{larger.world_size} devices", (more, choice)


def faster(case: Case, choice: str) -> Iterator[Variant]:
    """What may take less time at the price of memory or of digits."""
    config, rates = case.config, case.cluster.device.flops_per_s
    is_fp32 = config.strategy.precision == "fp32" and not config.strategy.param_dtype
    if is_fp32 and rates.get("bfloat16", 0.0) > rates.get("float32", 0.0):
        costs = costs_of(case.cluster, case.costs.contention)
        yield "--precision bf16", (replace(case, config=config.but(precision="bf16"), costs=costs), choice)
    for blocks in (SELECTIVE, NO_RECOMPUTATION):
        if config.strategy.activation_checkpointing not in (NO_RECOMPUTATION, blocks):
            other = config.but(activation_checkpointing=blocks)
            yield f"--activation-checkpointing {blocks}", (replace(case, config=other), choice)


def what_fits(nearest: Row, tried: list[Variant], found: list[Outcome]) -> str:
    """Which of the variants that were tried have room for the choice that comes nearest."""
    fitting = [
        f"{words} ({gib(simulated.memory.peak_bytes)} at the peak, {simulated.step_time_s * 1e3:,.1f} ms a step"
        f"{price_of(outcome.case, simulated.step_time_s)})"
        for (words, _), outcome in zip(tried, found, strict=True)
        if (simulated := outcome.simulated) and outcome.fits()
    ]
    if fitting:
        return f"{nearest['name']} would fit with any of: {'; '.join(fitting)}."
    return f"{nearest['name']} would fit with none of: {'; '.join(words for words, _ in tried)}."


def price_of(case: Case, step_s: float) -> str:
    """What all tokens cost, or a billion, or samples, at a step of so many seconds; empty without a price."""
    found = rates(case, step_s, None)
    if said := total(found):
        return said
    of_tokens, of_samples = found.get("cost_per_billion_tokens"), found.get("cost_per_million_samples")
    if of_tokens is not None:
        return f", {of_tokens:,.0f} $ for a billion tokens"
    return f", {of_samples:,.2f} $ for a million samples" if of_samples is not None else ""


def what_is_faster(best: Row, tried: list[Variant], found: list[Outcome]) -> list[str]:
    """Which of the variants that were tried take less time than the recommended choice, and fit."""
    told = [
        f"{words} {simulated.step_time_s * 1e3:,.1f} ms a step and {gib(simulated.memory.peak_bytes)}"
        for (words, _), outcome in zip(tried, found, strict=True)
        if (simulated := outcome.simulated) and outcome.fits() and simulated.step_time_s * 1e3 < best["step_time_ms"]
    ]
    return [f"Faster, of {best['name']}: {listed(told)} at the peak."] if told else []
