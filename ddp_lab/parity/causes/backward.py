"""Tests of gradients as the optimizer reads them, of updates and of buffers."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ddp_lab.parity.causes.forward import factor_has_a_name
from ddp_lab.parity.causes.look import (
    NEAR,
    Look,
    Words,
    and_others,
    factor_name,
    is_close,
    is_power_of_two,
    scale_after_backward,
    sketch_of,
    times,
    weights_of_micro_batches,
    weights_of_parts,
)
from ddp_lab.parity.comparison import FILLED, UNSEEN
from ddp_lab.parity.store import BUFFER, PARAMETER

CLOSE = 2e-3
"""Relative, of norms."""
ONE_ROUNDING = {"bf16": (2**-11, 2**-8), "fp16": (2**-14, 2**-11)}
"""Relative norm of the error of one rounding to 8 or 11 bits. It is below half a unit in the last place, and not far
below a third of one, at any magnitude. Sketches estimate it to a quarter."""
REASONS = {
    "a loss scale": "gradients still have the loss scale: scaler.unscale_(optimizer) before they are clipped or read",
    "1 / ranks x micro-batches": "divided by ranks and micro-batches where the reduction averages already",
    "1 / ranks": "averaged twice: the loss or the gradient is divided by the ranks, and the reduction averages, too "
    "(DDP's and FSDP's do)",
    "1 / micro-batches": "divided by the micro-batches twice: by the loop, and by an engine or a trainer (trap 4)",
    "ranks": "summed over ranks where the mean is wanted: a sum on top of DDP's average, or means of ranks under a sum",
    "ranks x micro-batches": "summed over ranks and micro-batches where the mean is wanted",
    "micro-batches": "the loss is not divided by the number of micro-batches (trap 4)",
}
"""The causes of a factor that all gradients have."""

# Gradients ------------------------------------------------------------------------------------------------------------


def gradient_is_missing(look: Look) -> Words | None:
    in_a, in_b = look.comparison.only.get(look.step, ([], []))
    names, run, other_run = (in_a, "B", "A") if in_a else (in_b, "A", "B")
    return {"names": and_others(names), "count": len(names), "which": run, "other": other_run} if names else None


def is_frozen_in_one_run(look: Look) -> bool:
    frozen = set(look.comparison.a.first["frozen"]) ^ set(look.comparison.b.first["frozen"])
    in_a, in_b = look.comparison.only[look.step]
    return bool(frozen & set(in_a or in_b))


def module_is_unseen(look: Look) -> bool:
    in_a, in_b = look.comparison.only[look.step]
    return bool({name.rpartition(".")[0] for name in in_a or in_b} & look.comparison.left_out[UNSEEN])


def no_gradient_is_in_both(look: Look) -> bool:
    return not look.gradients and not all(look.comparison.only[look.step])


def only_hooked_differ(look: Look) -> bool:
    differing = {gradient.name for gradient in look.gradients if gradient.differs}
    return differing <= set(look.comparison.a.first["hooked"]) and len(differing) < len(look.gradients)


def norms_differ_by_rank(look: Look) -> bool:
    """The norm differs between ranks: it is taken before a reduction, or there is none."""
    norms = [facts["norms"] for facts in look.comparison.b.facts[look.step]]
    return len(norms) > 1 and all(norms) and bool(np.ptp([of_rank[0] for of_rank in norms]) > NEAR * norms[0][0])


def some_ranks_agree(look: Look) -> Words | None:
    gradients = [gradient for gradient in look.gradients if not gradient.is_small]  # rounding is alike nowhere
    apart = sum(gradient.spread > gradient.limit for gradient in gradients)
    return {"apart": apart, "all": len(gradients)} if apart < len(gradients) else None


def ranks_have_other_factors(look: Look) -> Words | None:
    """Gradients differ by a factor of each rank, and in nothing else."""
    first = look.first
    is_factor = all(remainder <= CLOSE * abs(first.factor[key]) for key, remainder in first.remainder.items())
    return {"factors": _by_rank({rank: factor for (rank, _), factor in first.factor.items()})} if is_factor else None


def parts_have_other_factors(look: Look) -> Words | None:
    weights = weights_of_parts(look.comparison, look.step)
    if weights is None or np.ptp(weights) <= NEAR * np.abs(weights).max():
        return None
    return {"factors": _by_rank(dict(enumerate(1 / weights)))}


def _by_rank(factors: Mapping[int, float]) -> str:
    return ", ".join(f"x {factor:.4g} on rank {rank}" for rank, factor in list(factors.items())[:4])


def samples_are_filled_up_otherwise(look: Look) -> bool:
    return bool(look.comparison.left_out[FILLED])


def is_sum_with_step_before(look: Look) -> bool:
    """A gradient of run B is run A's plus run B's of the step before."""
    now, before = (sketch_of(look.comparison.b, step, look.first) for step in (look.step, look.step - 1))
    return is_close(now - before, sketch_of(look.comparison.a, look.step, look.first))


def is_of_step_before(look: Look) -> bool:
    """Run B has the gradient that run A had one step before."""
    now, before = (
        sketch_of(look.comparison.b, look.step, look.first),
        sketch_of(look.comparison.a, look.step - 1, look.first),
    )
    return is_close(now, before)


def losses_have_other_scales(look: Look) -> Words | None:
    """The losses of ranks or micro-batches count alike, though they are means over different numbers."""
    scales = {key: scale for key, scale in look.comparison.scales[look.step].items() if key[0] >= 0}
    values = np.abs(list(scales.values()))
    if len(values) < 2 or np.ptp(values) <= NEAR * values.max():
        return None
    return {"scales": ", ".join(f"x {scale:.4g} on rank {rank}" for (rank, _), scale in list(scales.items())[:4])}


def micro_batches_count_otherwise(look: Look) -> Words | None:
    weights = weights_of_micro_batches(look.comparison, look.step)
    if weights is None or np.ptp(weights) <= 10 * NEAR * np.abs(weights).max():
        return None
    counted = ""
    for counts, name in ((np.abs(weights).max(1), "rank"), (np.abs(weights).max(0), "micro-batch")):
        indices = np.flatnonzero(counts > 10 * NEAR * counts.max())
        if len(indices) == 1 < len(counts):
            is_last = name == "micro-batch" and indices[0] == len(counts) - 1
            counted = f"the last {name}" if is_last else f"{name} {indices[0]}"
    return {"weights": ", ".join(f"x {weight:.3g}" for weight in weights[0]), "counted": counted}


def one_micro_batch_counts(look: Look) -> Words | None:
    words = micro_batches_count_otherwise(look)
    return words if words and words["counted"] else None


def clips_in_one_run(look: Look) -> Words | None:
    in_a, in_b = map(bool, look.facts("norms"))
    return {"which": "A" if in_a else "B"} if in_a != in_b else None


def clips_in_both_runs(look: Look) -> Words | None:
    in_a, in_b = look.facts("norms")
    return {"norm_a": in_a[0]} if in_a and in_b else None


def norms_differ(look: Look) -> Words | None:
    """The norm of all gradients differs by more than their rounding explains."""
    in_a, in_b = look.facts("norms")
    norms, limits = (np.array([getattr(gradient, name) for gradient in look.gradients]) for name in ("norm", "limit"))
    rounding = float(np.linalg.norm(limits * norms)) / max(float(np.linalg.norm(norms)), 1e-300)
    if not in_a or not in_b or abs(in_b[0] / in_a[0] - 1) <= max(CLOSE / 4, rounding):
        return None
    return {"norm_a": in_a[0], "norm_b": in_b[0], "quotient": times(look.comparison, in_b[0] / in_a[0])}


def losses_differ(look: Look) -> Words | None:
    a, b = look.facts("loss")
    if a is None or b is None or abs(b / a - 1) <= CLOSE:
        return None
    return {"loss_a": a, "loss_b": b, "quotient": times(look.comparison, b / a)}


def only_replicas_differ(look: Look) -> Words | None:
    """On a mesh that cuts layers or tokens, only tensors differ that each rank holds whole."""
    names = [gradient.name for gradient in look.gradients if gradient.differs]
    is_cut = set(look.comparison.b.first.get("mesh", {})) & {"tp", "cp"}
    are_whole = all("norm" in name or name.endswith("bias") for name in names)
    return {"names": and_others(names)} if is_cut and are_whole and len(names) < len(look.gradients) else None


def some_are_multiples(look: Look) -> Words | None:
    factor = look.first.one_factor
    if factor is None:
        return None
    factors = {gradient.name: gradient.one_factor for gradient in look.gradients if gradient.norm}
    alike = [name for name, value in factors.items() if value is not None and abs(value / factor - 1) < NEAR]
    return {"names": and_others(alike), "is_all": len(alike) > 0.9 * len(factors)}


def all_are_multiples(look: Look) -> bool:
    words = some_are_multiples(look)
    return bool(words and words["is_all"])


def earlier_steps_agree(look: Look) -> bool:
    return look.step > look.comparison.steps[0]


def run_a_scales_after_backward(look: Look) -> Words | None:
    """Run A scales by no power of two: such a factor may be a loss scale or the number of micro-batches."""
    scale = scale_after_backward(look.comparison, look.step)
    return None if factor_has_a_name(look) or is_power_of_two(scale, 1e-5) else {"scale": scale}


def factor_has_reasons(look: Look) -> Words:
    names = factor_name(look.comparison, look.first.one_factor or 1.0).split(" or ")
    reasons = [REASONS[name] for name in names if name in REASONS]
    return {"reasons": "; or ".join(reasons) or "a scale of the loss or of the reduction that one run alone has"}


def all_are_off_by_one_rounding(look: Look) -> Words | None:
    """Gradients differ by one rounding to a lower precision, and all before them agrees."""
    errors = np.array([gradient.worst for gradient in look.gradients if gradient.norm and not gradient.is_small])
    for dtype, (least, most) in ONE_ROUNDING.items():
        if ((least <= errors) & (errors <= most)).sum() > 0.8 * len(errors):
            return {"dtype": dtype}
    return None


# Updates and buffers --------------------------------------------------------------------------------------------------


def optimizers_have_other_settings(look: Look) -> Words | None:
    for rank, of, key, a, b in _settings(look):
        if _equal(a, b):
            continue
        words = {"key": key, "of": of, "a": _short(a), "b": _short(b), "on_rank": ""}
        if isinstance(a, float | int) and isinstance(b, float | int) and a and b:
            named = factor_name(look.comparison, b / a)
            words["b"] += f" (x {b / a:.4g}{f' = {named}' if named else ''})"
        on_ranks = [facts.get("optimizer", {}).get(of, {}).get(key, b) for facts in look.comparison.b.facts[look.step]]
        if not all(_equal(value, b) for value in on_ranks):
            words["on_rank"] = f" on rank {rank}"
        return words
    return None


def _settings(look: Look) -> Iterator[tuple[int, str, str, Any, Any]]:
    """(rank, parameter, setting, run A's value, run B's value), of the parameter if both runs name it."""
    in_a, name = look.facts("optimizer")[0] or {}, look.first.name
    for rank, facts in enumerate(look.comparison.b.facts[look.step]):
        in_b = facts.get("optimizer", {})
        pairs = [(name, in_a[name], in_b[name])] if name in in_a and name in in_b else []
        if not pairs:
            groups = [list({str(group): group for group in of_run.values()}.values()) for of_run in (in_a, in_b)]
            pairs = [("all", *of_both) for of_both in zip(*groups, strict=False)]
        for of, a, b in pairs:
            yield from ((rank, of, key, a[key], b[key]) for key in b if key in a)


def _equal(a: Any, b: Any) -> bool:
    return bool(np.allclose(np.array(a, dtype=float), np.array(b, dtype=float), rtol=1e-6, atol=0))


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


def is_not_updated(look: Look) -> Words | None:
    updates = [update for update in look.comparison.of(look.step, PARAMETER) if update.norm]
    still = [update.name for update in updates if max(map(abs, update.factor.values())) < 1e-9]
    return {"names": and_others([look.first.name, *still[1:]])} if look.first.name in still else None


def is_not_updated_there(look: Look) -> bool:
    return all(abs(factor) < 1e-9 for (rank, _), factor in look.first.factor.items() if rank in look.ranks)


def others_alone_have_a_gradient(look: Look) -> bool:
    gradients = [gradient for gradient in look.gradients if gradient.name == look.first.name]
    holders = {rank for gradient in gradients for rank, _ in gradient.error}
    return bool(holders) and not holders & {-1, *look.ranks}


def mean_of_this_variance_agrees(look: Look) -> Words | None:
    """Of running statistics."""
    module, _, name = look.first.name.rpartition(".")
    mean = f"{module}.running_mean".lstrip(".")
    agreeing = [buffer.name for buffer in look.comparison.of(look.step, BUFFER) if not buffer.differs]
    return {"mean": mean} if name == "running_var" and mean in agreeing else None
