"""What a reader must know of a plan besides its table, in sentences: which case to take and why, what would make others
fit or be faster, and how sure all that is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.links import LINK_ERROR
from ddp_lab.planner.model import IMAGES, SAMPLES, TOKENS
from ddp_lab.planner.outcome import CaseOutcome
from ddp_lab.planner.rates import best_interval, checkpoint_bytes
from ddp_lab.planner.search import TIGHT
from ddp_lab.planner.space import GIB, Case, Space, entrypoints
from ddp_lab.planner.table import HOUR_S, interval, note, rates, runner_command
from ddp_lab.runtime.errors import UserError, listed
from ddp_lab.runtime.settings.data import CAUSAL_LM
from ddp_lab.runtime.settings.field import flag_name
from ddp_lab.runtime.settings.mesh import ULYSSES
from ddp_lab.strategy.options import BLOCK, NO_RECOMPUTATION, SELECTIVE

AS_FAST = 0.02
"""Choices that take at most this share longer than the fastest count as equally fast: most errors are common to all."""
AMPLE = 0.2
"""What leaves this share of the usable memory free has ample room, so that a smaller peak is no advantage."""
MOST_ROWS = 10
NAMED = ("mesh", "lora_rank", "param_dtype", "reduce_dtype", "activation_checkpointing", "loss_chunks", "offload")
"""Settings that the headline names where they are given."""
LEANEST = "zero3"
MORE_DEVICES = (2, 4, 8)
CHUNKS = 8
"""Parts of the loss that are tried where a plan computes it whole."""
UNSURE = "and what the allocator keeps unused is not in the peak"

# What to take ---------------------------------------------------------------------------------------------------------


def equally_fast(outcomes: Sequence[CaseOutcome]) -> list[CaseOutcome]:
    """Of those that leave a tenth of the memory free, or if none does, of those that fit, the fastest and those that
    are equally fast."""
    fitting = [outcome for outcome in outcomes if outcome.fits()]
    fitting = [outcome for outcome in fitting if outcome.fits(TIGHT)] or fitting
    limit_s = min((outcome.step_s for outcome in fitting), default=0.0) * (1 + AS_FAST)
    return [outcome for outcome in fitting if outcome.step_s <= limit_s]


def recommended(outcomes: Sequence[CaseOutcome]) -> CaseOutcome | None:
    """Of the equally fast ones, the first of those that leave ample room, if one does without a mesh; if none leaves
    it, the one with the smallest peak. None if none fits."""
    equal = equally_fast(outcomes)
    roomy = sorted(
        (outcome for outcome in equal if outcome.fits(AMPLE)), key=lambda outcome: outcome.case.mesh is not None
    )
    return roomy[0] if roomy else min(equal, key=lambda outcome: outcome.peak_bytes, default=None)


def front(outcomes: Sequence[CaseOutcome], best: CaseOutcome) -> list[CaseOutcome]:
    """The best, and those that no other beats both in speed and in memory to spare, the fastest first."""
    rows, most = [best], -1.0
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.step_s, -outcome.spare_bytes)):
        if outcome.fits(TIGHT if best.fits(TIGHT) else 0.0) and outcome.spare_bytes > most:
            most = outcome.spare_bytes
            rows += [outcome] * (outcome is not best)
    return rows[:MOST_ROWS]


def reasons(outcomes: Sequence[CaseOutcome], searches: bool = False) -> list[str]:
    """Which case to take and why, or what is missing."""
    simulated = [outcome for outcome in outcomes if outcome.simulated]
    if not simulated:
        return ["No strategy could be simulated, so there is nothing to recommend."]
    leanest, best = min(simulated, key=lambda outcome: outcome.peak_bytes), recommended(outcomes)
    if best is None:
        nearest = f"{described(leanest) if searches else leanest.case.name} comes nearest"
        return [
            f"No strategy fits. {nearest}: its peak of {gib(leanest.peak_bytes)} is {gib(-leanest.spare_bytes)} more "
            "than a device has left for tensors."
        ]
    assert best.simulated
    name, step_ms = best.case.name, best.step_s * 1e3
    low_s, high_s = interval(best.simulated, best.case.costs)
    sentences = [
        f"Take {described(best) if searches else name}: {step_ms:,.1f} ms a step ({low_s * 1e3:,.1f} to "
        f"{high_s * 1e3:,.1f}), {speed(best)}; its peak of {gib(best.peak_bytes)} leaves {gib(best.spare_bytes)} to "
        "spare.",
        f"Run it: {runner_command(best.case)}",
    ]
    fits = [outcome for outcome in simulated if outcome.fits()]
    fastest = min(fits, key=lambda outcome: outcome.step_s)
    if not best.fits(TIGHT):
        sentences.append(f"Nothing leaves a tenth of the memory free, {UNSURE}.")
    elif not fastest.fits(TIGHT) and fastest.step_s < best.step_s:
        sentences.append(
            f"{fastest.case.name} is faster, {fastest.step_s * 1e3:,.1f} ms a step, and not recommended: it leaves "
            f"{gib(fastest.spare_bytes)}, less than a tenth, {UNSURE}."
        )
    if searches:
        return sentences
    # Others
    equal = equally_fast(outcomes)
    if len(equal) > 1:
        why = "it is the simplest of them with ample room" if best.fits(AMPLE) else "its peak is the smallest of them"
        names = listed([outcome.case.name for outcome in equal if outcome is not best])
        sentences.append(f"Equally fast within {AS_FAST:.0%}: {names}; {name} is taken since {why}.")
    if leanest.peak_bytes < 0.95 * best.peak_bytes:
        sentences.append(
            f"For larger batches or models, {leanest.case.name} has the smallest peak: {gib(leanest.peak_bytes)}, at "
            f"{leanest.step_s / best.step_s:.2f} times the step time."
        )
    if best.spare_bytes > best.peak_bytes:
        unused = f"{gib(best.spare_bytes)} of a device's memory stay unused"
        sentences.append(f"{unused}: `ddp-lab plan search` looks for the batch, recomputation and mesh that use them.")
    return sentences


def described(outcome: CaseOutcome) -> str:
    """`zero2, 4 micro-batches of 2, recomputation selective`."""
    steps, micro = outcome.case.config.grad_accum_steps, outcome.case.micro_batch_size
    count = f"{steps} micro-batches" if steps > 1 else "one micro-batch"
    again = "no recomputation" if outcome.case.level == NO_RECOMPUTATION else f"recomputation {outcome.case.level}"
    return f"{outcome.case.name}, {count} of {micro}, {again}{', compiled' * outcome.case.config.strategy.compile}"


def checkpoints(best: CaseOutcome, mtbf_hours: float, gb_per_s: float) -> str:
    """How often to save one, and what that costs."""
    nbytes = checkpoint_bytes(best.case.model, best.case.config.strategy.precision)
    interval_s, share = best_interval(nbytes / gb_per_s / 1e9, mtbf_hours * HOUR_S)
    return (
        f"Checkpoints: {gib(nbytes)} take {nbytes / gb_per_s / 1e9:,.1f} s at {gb_per_s:g} GB/s; with a failure every "
        f"{mtbf_hours:g} hours save one every {interval_s / 60:,.1f} minutes (--checkpoint-every "
        f"{max(1, round(interval_s / best.step_s))}), which with what failures undo costs {share:.1%} (Young, Daly)."
    )


def speed(outcome: CaseOutcome) -> str:
    """Samples or tokens a second, and what all tokens take and cost, if that is asked."""
    figures = rates(outcome.case, outcome.step_s, None)
    throughput = f"{figures['samples_per_second']:,.1f} samples/s on all devices"
    if "tokens_per_second" in figures:
        throughput = f"{figures['tokens_per_second']:,.0f} tokens/s on all devices"
    return throughput + total(figures)


def total(figures: Mapping[str, float]) -> str:
    """What --tokens take and cost; empty without them."""
    dollars = f" and {figures['training_cost']:,.0f} $" if "training_cost" in figures else ""
    return f", {figures['training_hours']:,.1f} hours{dollars} in all" if "training_hours" in figures else ""


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.2f} GiB"


# Beside it: one axis released -----------------------------------------------------------------------------------------


def remedies(case: Case, any_choice: bool) -> Iterator[tuple[str, Case]]:
    """What needs less memory, one change at a time, and two at once. Changes that make no sense are left out.
    `any_choice`: the leanest choice is one."""
    strategy, micro = case.config.strategy, case.micro_batch_size
    alone = {"grad_accum_steps": case.config.grad_accum_steps * micro} if micro > 1 else {}
    changes: list[Mapping[str, Any]] = [alone] if alone else []
    if strategy.activation_checkpointing == NO_RECOMPUTATION:
        changes += [{"activation_checkpointing": level} for level in (SELECTIVE, BLOCK)]
        changes += [{"activation_checkpointing": BLOCK, **alone}] if alone else []
    if case.model.task == CAUSAL_LM and strategy.loss_chunks == 1:
        changes.append({"loss_chunks": CHUNKS})
    if any_choice and case.config.choice != LEANEST and LEANEST in entrypoints(case.mesh):
        changes.append({"choice": LEANEST})
    yield from changed(case, changes)
    for factor in MORE_DEVICES if case.mesh is None else ():
        cluster, ranks = case.cluster, case.cluster.ranks_per_node * factor
        nodes, ranks = (cluster.nodes, ranks) if ranks <= 8 else (cluster.nodes * factor, cluster.ranks_per_node)
        between = cluster.between or cluster.inside
        larger = replace(cluster, nodes=nodes, ranks_per_node=ranks, between=between)
        if case.config.global_batch_size % (case.config.grad_accum_steps * larger.world_size) == 0:
            yield f"{larger.world_size} devices", replace(case, cluster=larger)


def hints(case: Case) -> Iterator[tuple[str, Case]]:
    """What may take less time at the price of memory or of digits."""
    strategy, rates = case.config.strategy, case.cluster.device.flops_per_s
    is_fp32 = strategy.precision == "fp32" and not strategy.param_dtype
    if is_fp32 and rates.get("bfloat16", 0.0) > rates.get("float32", 0.0):
        yield from changed(case, [{"precision": "bf16"}])
    if case.level != NO_RECOMPUTATION:
        levels = [level for level in (SELECTIVE, NO_RECOMPUTATION) if level != case.level]
        yield from changed(case, [{"activation_checkpointing": level} for level in levels])


def changed(case: Case, changes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Case]]:
    """The case with each of the changes that goes with its other settings, and the flags that make it."""
    for change in changes:
        try:
            yield " and ".join(f"{flag_name(name)} {value}" for name, value in change.items()), case.but(**change)
        except UserError:
            continue


def what_fits(name: str, tried: Sequence[str], outcomes: Sequence[CaseOutcome]) -> str:
    """Which of the changes that were tried make room for what comes nearest."""
    fitting = [
        f"{words} ({gib(outcome.peak_bytes)} at the peak, {outcome.step_s * 1e3:,.1f} ms a step{price_of(outcome)})"
        for words, outcome in zip(tried, outcomes, strict=True)
        if outcome.fits()
    ]
    any_of = f"any of: {'; '.join(fitting)}" if fitting else f"none of: {'; '.join(tried)}"
    return f"{name} would fit with {any_of}."


def price_of(outcome: CaseOutcome) -> str:
    """What all tokens cost, or a billion, or samples; empty without a price."""
    figures = rates(outcome.case, outcome.step_s, None)
    if "training_hours" not in figures and "cost_per_billion_tokens" in figures:
        return f", {figures['cost_per_billion_tokens']:,.0f} $ for a billion tokens"
    if "cost_per_million_samples" in figures:
        return f", {figures['cost_per_million_samples']:,.2f} $ for a million samples"
    return total(figures)


def what_is_faster(best: CaseOutcome, tried: Sequence[str], outcomes: Sequence[CaseOutcome]) -> list[str]:
    """Which of the changes that were tried take less time than the recommended case, and fit."""
    faster = [
        f"{words} {outcome.step_s * 1e3:,.1f} ms a step and {gib(outcome.peak_bytes)}"
        for words, outcome in zip(tried, outcomes, strict=True)
        if outcome.fits() and outcome.step_s < best.step_s
    ]
    return [f"Faster, of {best.case.name}: {listed(faster)} at the peak."] if faster else []


# What is planned, and how sure it is ----------------------------------------------------------------------------------


def headline(space: Space) -> str:
    """What is planned; unless it is searched, also how many micro-batches a step has."""
    case, cases = space.cases[0], space.cases
    cluster, config = case.cluster, case.config
    nodes = f"{cluster.nodes} nodes of " * (cluster.nodes > 1) + f"{cluster.ranks_per_node}"
    between = f", {cluster.between.name} between nodes" if cluster.between and cluster.nodes > 1 else ""
    sizes_of = {TOKENS: f" of {case.sequence_length} tokens", IMAGES: " of 224 x 224 pixels", SAMPLES: ""}
    samples = f"samples{sizes_of[case.model.kind]}"
    sizes, counts = (
        " or ".join(map(str, sorted(numbers)))
        for numbers in (
            {mesh_case.micro_batch_size for mesh_case in cases},
            {mesh_case.config.grad_accum_steps for mesh_case in cases},
        )
    )
    values = {name: config.as_dict()[name] for name in NAMED if not (len(cases) > 1 and name == "mesh")}
    settings = [
        *[case.model.task] * (case.model.kind == "tokens"),
        config.strategy.precision,
        *(f"{flag_name(name)} {value}" for name, value in values.items() if value not in (None, NO_RECOMPUTATION, 1)),
        *["--sequence-parallel"] * any(mesh_case.config.sequence_parallel for mesh_case in cases),
        *{f"pipelines {mesh_case.config.pipeline_schedule}" for mesh_case in cases if mesh_case.config.has_stages},
    ]
    steps = f": {counts} micro-batch{'es' * (counts != '1')} of {sizes} on each rank" * (not space.any_steps)
    return (
        f"PREDICTED, not measured: {case.model.name} ({case.model.elements() / 1e6:,.1f} M parameters) "
        f"on {nodes} x {cluster.device.name}, {cluster.inside.name}{between}.\nA global batch of "
        f"{config.global_batch_size} {samples}{steps}; {', '.join(settings)}."
    )


def notes(outcomes: Sequence[CaseOutcome], left_out: Sequence[str]) -> list[str]:
    """What is not known of a choice, with all choices that it is about, and what is left out."""
    by_note: dict[str, list[str]] = {}
    for outcome in outcomes:
        by_note.setdefault(note(outcome.simulated) if outcome.simulated else outcome.reason, []).append(
            outcome.case.name
        )
    about = [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in by_note.items() if text]
    return about + [f"Left out: {line}" for line in left_out]


def certainty(space: Space) -> list[str]:
    """What is assumed, what intervals and spare memory mean, and where the costs come from."""
    case, cases = space.cases[0], space.cases
    costs, cluster, price = case.costs, case.cluster, case.price
    is_cuda = cluster.device.kind == "cuda"
    spare = "a device's memory, less what is outside torch" if is_cuda else "a rank's part of the machine's memory"
    lines = []
    if is_cuda:
        least, most = (gib(bound(mesh_case.outside_bytes for mesh_case in cases)) for bound in (min, max))
        amount = least if least == most else f"{least} to {most}, by mesh"
        lines.append(f"Outside torch: {amount} for CUDA and NCCL ({hardware.table()['outside']['source']}).")
    if any(mesh_case.config.has_experts for mesh_case in cases):
        lines.append("Experts: each is assumed to get equally many tokens; one that gets more holds up all ranks.")
    # No plan has a dropout of attention: kernels keep nothing for it. But a ring refuses to run with it.
    has_ring = any(mesh_case.config.cuts_tokens and mesh_case.config.context_parallel != ULYSSES for mesh_case in cases)
    if has_ring and (dropout := case.model.attention_dropout):
        advice = "A ring refuses to run with it: set it to 0 in the model's config, or take ulysses."
        lines.append(f"Dropout: that of attention ({dropout:g}) is left out. {advice}")
    lines.append(
        f"Intervals: operators off by {costs.compute_error:.0%} at most and collectives by {LINK_ERROR:.0%}. "
        "Errors of operators are common to all strategies, so their order is surer than their times. "
        f"To spare: of {spare}."
    )
    lines += costs.sources
    if is_cuda and case.config.strategy.offload:
        lines.append(f"Host: {hardware.host(cluster.ranks_per_node).source}.")
    missing = f"none is listed for {cluster.device.name}; --price PER_HOUR adds what tokens cost."
    return [
        *lines,
        f"Price: ${price.amount:g} an hour for each device ({price.source})." if price else f"Price: {missing}",
    ]
