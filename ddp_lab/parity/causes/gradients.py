"""Gradients, as the optimizer reads them."""

import numpy as np

from ddp_lab.parity.causes.cause import NEAR, Cause, Rule, and_others, factor_name, times
from ddp_lab.parity.causes.data import untied
from ddp_lab.parity.comparison import Comparison, Quantity
from ddp_lab.parity.lookback import (
    is_of_step_before,
    is_sum_with_step_before,
    scale_after_backward,
    weights_of_micro_batches,
)
from ddp_lab.parity.store import GRADIENT

CLOSE = 2e-3
"""Relative, of norms."""
ONE_ROUNDING = {"bf16": (2**-11, 2**-8), "fp16": (2**-14, 2**-11)}
"""Relative norm of the error that one rounding leaves: below half a unit in the last place of 8 and 11 bits, and not
far below a third of it, at any magnitude. Sketches estimate it to a quarter."""


def missing(made: Comparison, step: int) -> Cause | None:
    in_a, in_b = made.only.get(step, ([], []))
    names, which, other = (in_a, "B", "A") if in_a else (in_b, "A", "B")
    if not names:
        return None
    if set(names) & (set(made.a.first["frozen"]) ^ set(made.b.first["frozen"])):
        why = "it is frozen in one run (trap 8)."
    elif {name.rpartition(".")[0] for name in names} & made.unseen:
        why = "its module runs without autograd: in a checkpoint with use_reentrant=True whose inputs need no gradient "
        why += "(use_reentrant=False does without), or under no_grad()."
    elif not made.of(step, GRADIENT) and not (in_a and in_b):
        return Cause(
            f"no gradient of run {which} could be read, and {len(names)} of run {other}",
            "its optimizer updates tensors that are not the module's, as flat copies of an engine that watch does not "
            "know. What both runs have agrees before that.",
        )
    else:
        why = "it is not used there, or its gradient never arrives: a branch of one rank, an unused parameter (trap 2)."
    return Cause(f"{names[0]}{and_others(names)} has no gradient in run {which}, and one in run {other}", why)


def hooks(made: Comparison, first: Quantity) -> Cause | None:
    differing = {one.name for one in made.of(first.step, GRADIENT) if one.differs}
    if not differing <= set(made.a.first["hooked"]) or len(differing) == len(made.of(first.step, GRADIENT)):
        return None
    return Cause(
        f"{first.name} has a gradient hook, and gradients without one agree",
        "the wrapper does not call the hook (FSDP2 never does), or calls it on another part or at another time. Change "
        "gradients between the last backward and step().",
    )


def not_reduced(made: Comparison, first: Quantity) -> Cause | None:
    """Replicas whose gradients are not the same."""
    if first.spread <= first.limit:
        return None
    gradients = [one for one in made.of(first.step, GRADIENT) if not one.is_small]  # rounding is alike nowhere
    apart = [one for one in gradients if one.spread > one.limit]
    if len(apart) < len(gradients):
        return Cause(
            f"the gradient of {first.name} is not the same on all ranks ({len(apart)} of {len(gradients)} are not)",
            "it is not reduced: it was made after the wrapper was, is used outside of its forward, or is ignored by "
            "it. Or layers, tokens or stages (with tied weights) are cut over ranks, and each has a part: sum these.",
        )
    return Cause(
        "gradients are not the same on all ranks: nobody has reduced them over all ranks",
        "the last micro-batch ran within no_sync(), the loop calls the bare module instead of the wrapper, or the "
        "reduction is over a group of some ranks (trap 3).",
    )


def clipped_alone(made: Comparison, first: Quantity) -> Cause | None:
    """Before a reduction, after which ranks agree, or without one."""
    norms = [facts["norms"] for facts in made.b.facts[first.step]]
    if len(norms) < 2 or not all(norms) or np.ptp([of_rank[0] for of_rank in norms]) <= NEAR * norms[0][0]:
        return None
    return Cause(
        "each rank clips by a norm of its own",
        "gradients are clipped before they are reduced, or by the norm of a shard: clip after the last backward, by "
        "the norm of the whole model (trap 9).",
    )


def not_dropped(made: Comparison, first: Quantity) -> Cause | None:
    if not first.step or not is_sum_with_step_before(made, first):
        return None
    return Cause(
        f"gradients of step {first.step} are added to those of step {first.step - 1}",
        "zero_grad() is missing, or drops the gradients of other tensors than the optimizer's (trap 18).",
    )


def late(made: Comparison, first: Quantity) -> Cause | None:
    if not first.step or not is_of_step_before(made, first):
        return None
    return Cause(
        f"the {first.kind} of {first.name} in step {first.step} is that of step {first.step - 1}: one step late",
        "the optimizer runs before the reduction is done, or reads a copy of the gradients: wait before step().",
    )


def uneven_means(made: Comparison, first: Quantity) -> Cause | None:
    """The losses of ranks or micro-batches count alike, though they are means over different numbers."""
    scales = {which: scale for which, scale in made.scales.get(first.step, {}).items() if which[0] >= 0}
    values = np.abs(list(scales.values()))
    if len(values) < 2 or np.ptp(values) <= NEAR * values.max():
        return None
    shown = ", ".join(f"x {scale:.4g} on rank {rank}" for (rank, _), scale in list(scales.items())[:4])
    return Cause(
        f"a sample weighs otherwise from micro-batch to micro-batch ({shown}, beside run A)",
        "a mean of means: each micro-batch divides by its own number of tokens or samples. Divide by the number in the "
        "whole global batch (strategy.loss_weights; traps 4 and 5).",
    )


def part_of_batch(made: Comparison, first: Quantity) -> Cause | None:
    weights = weights_of_micro_batches(made, first.step)
    if weights is None or np.ptp(weights) <= 10 * NEAR * np.abs(weights).max():
        return None
    for counts, name in ((np.abs(weights).max(0), "micro-batch"), (np.abs(weights).max(1), "rank")):
        counted = np.flatnonzero(counts > 10 * NEAR * counts.max())
        if len(counted) == 1 < len(counts):
            is_last = name == "micro-batch" and counted[0] == len(counts) - 1
            return Cause(
                f"gradients are those of {f'the last {name}' if is_last else f'{name} {counted[0]}'} alone",
                "zero_grad() between the micro-batches of a step, or a micro-batch that is left out of the sum.",
            )
    shown = ", ".join(f"x {weight:.3g}" for weight in weights[0])
    return Cause(
        f"micro-batches do not count alike: those of rank 0 count {shown}, beside run A",
        "gradients are summed over ranks after every micro-batch, with those that were summed before; or losses are "
        "weighed otherwise. Reduce once, after the last (trap 3).",
    )


def clipping(made: Comparison, first: Quantity) -> Cause | None:
    """Gradients are read as clipping leaves them."""
    a, b = (run.facts[first.step][0]["norms"] for run in (made.a, made.b))
    if bool(a) != bool(b):
        return Cause(
            f"run {'A' if a else 'B'} alone calls clip_grad_norm_",
            "clip in both runs, by one norm: code of one's own must sum squares over ranks before the root, or each "
            "rank clips by the norm of what it holds (trap 9).",
        )
    factor = first.one_factor
    if not a or factor is None:
        return None
    return other_norms(made, first.step) or Cause(
        f"both runs find a norm of {a[0]:.4g}, and clipping leaves gradients {times(made, factor)} in run B",
        "another largest norm, or gradients below it are scaled up: the factor is at most 1 (trap 9).",
    )


def replicas(made: Comparison, first: Quantity) -> Cause | None:
    """On a mesh that cuts layers or tokens, only what its ranks hold whole."""
    if not set(made.b.first.get("mesh", {})) & {"tp", "cp"}:
        return None
    gradients = made.of(first.step, GRADIENT)
    differing = [one.name for one in gradients if one.differs]
    if len(differing) == len(gradients) or not all("norm" in name or name.endswith("bias") for name in differing):
        return None
    return Cause(
        f"the gradient of {first.name}{and_others(differing)} differs: norms and biases, which each rank holds whole",
        "with tokens cut over ranks each sees a part of them: sum these gradients over the ranks of the group (of tp "
        "with sequence parallelism, of cp).",
    )


def by_factor(made: Comparison, first: Quantity) -> Cause | None:
    """All gradients, or some, are another's multiple."""
    factor = first.one_factor
    if factor is None:
        return None
    gradients = [one for one in made.of(first.step, GRADIENT) if one.norm]
    alike = [one for one in gradients if one.one_factor is not None and abs(one.one_factor / factor - 1) < NEAR]
    if len(alike) > 0.9 * len(gradients):
        if first.step > made.steps[0]:
            return Cause(
                f"all gradients of step {first.step} are {times(made, factor)}, and those of earlier steps agree",
                "this step is not like the others: a window of accumulation with fewer micro-batches, divided by as "
                "many as a full one has (trap 4); a last batch with fewer samples; or a loss scale that has changed.",
            )
        named, clipped = factor_name(made, factor), scale_after_backward(made, first.step)
        is_scale = abs(np.log2(abs(clipped)) - round(np.log2(abs(clipped)))) < 1e-5  # of a loss, or micro-batches
        if not named and not is_scale:
            return Cause(
                f"all gradients are {times(made, factor)}, and run A scales its own by {clipped:.4g} after backward",
                "clipping by another norm: it counts what ranks hold alike once for each of them, or misses what "
                "others hold (trap 9).",
            )
        return Cause(f"all gradients are {times(made, factor)}", _why(named))
    return Cause(
        f"the gradient of {first.name}{and_others([one.name for one in alike])} is {times(made, factor)}",
        "these alone are reduced once too often or too seldom: experts, parts of tensor parallelism, replicas of a "
        "norm or a bias, or a parameter that is used twice.",
    )


def rounded(made: Comparison, first: Quantity) -> Cause | None:
    """All gradients are off by what one rounding to a lower precision leaves, and all before them agrees."""
    gradients = [one for one in made.of(first.step, GRADIENT) if one.norm and not one.is_small]
    for dtype, (least, most) in ONE_ROUNDING.items():
        alike = [one for one in gradients if least <= one.worst <= most]
        if len(alike) > 0.8 * len(gradients):
            return Cause(
                f"outputs agree, and gradients are off by {first.worst:.1g} of their norm: one rounding to {dtype}",
                "they are reduced in a lower precision: a compression hook of DDP (bf16_compress_hook), reduce_dtype "
                "of FSDP2's mixed precision, or a cast around an all-reduce of one's own (trap 20).",
            )
    return None


def _why(named: str) -> str:
    reasons = {
        "a loss scale": "gradients still have the loss scale: scaler.unscale_(optimizer) before they are clipped or "
        "read",
        "1 / ranks x micro-batches": "divided by ranks and micro-batches where the reduction averages already",
        "1 / ranks": "averaged twice: the loss or the gradient is divided by the ranks, and the reduction averages, "
        "too (DDP's and FSDP's do)",
        "1 / micro-batches": "divided by the micro-batches twice: by the loop, and by an engine or a trainer (trap 4)",
        "ranks": "summed over ranks where the mean is wanted: a sum on top of DDP's average, or means of ranks under "
        "a sum",
        "ranks x micro-batches": "summed over ranks and micro-batches where the mean is wanted",
        "micro-batches": "the loss is not divided by the number of micro-batches (trap 4)",
    }
    found = [reasons[name] for name in named.split(" or ") if name in reasons]
    return f"{'; or '.join(found) or 'a scale of the loss or of the reduction that one run alone has'}."


RULES: list[Rule] = [
    untied,
    hooks,
    clipped_alone,
    not_reduced,
    not_dropped,
    late,
    uneven_means,
    part_of_batch,
    clipping,
    replicas,
    by_factor,
    rounded,
]


def other_norms(made: Comparison, step: int) -> Cause | None:
    """Nothing differs but what clipping would read, by more than rounding does to the norms of all gradients."""
    a, b = (run.facts[step][0]["norms"] for run in (made.a, made.b))
    gradients = made.of(step, GRADIENT)
    norms, limits = (np.array([getattr(one, name) for one in gradients]) for name in ("norm", "limit"))
    rounding = float(np.linalg.norm(limits * norms)) / max(float(np.linalg.norm(norms)), 1e-300)
    if not a or not b or abs(b[0] / a[0] - 1) <= max(CLOSE / 4, rounding):
        return None
    return Cause(
        f"step {step}: the norm by which run B clips is {b[0]:.6g}, and run A's is {a[0]:.6g} "
        f"({times(made, b[0] / a[0])})",
        "the norm counts replicas, misses shards, or is read before the reduction or the unscaling (trap 9); or the "
        "loss has another scale, which clipping takes out (trap 4).",
    )


def other_loss(made: Comparison, step: int) -> Cause | None:
    """Nothing differs but the loss that is told."""
    a, b = (run.facts[step][0].get("loss") for run in (made.a, made.b))
    if a is None or b is None or abs(b / a - 1) <= CLOSE:
        return None
    return Cause(
        f"step {step}: the loss that run B tells is {b:.6g}, and run A's is {a:.6g} ({times(made, b / a)})",
        "it is logged in another way than it is computed: of one micro-batch, of one rank, or divided once more "
        "(trap 4).",
    )
