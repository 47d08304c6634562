"""An output, or the gradient of one, that differs."""

from ddp_lab.parity.causes.cause import Cause, Rule, factor_name, listed, of_module, some_ranks
from ddp_lab.parity.comparison import Comparison, Quantity
from ddp_lab.parity.store import BUFFER, OUTPUT, OUTPUT_GRADIENT, START

SEEN = "a torch.autograd.Function around it has the matching collective in backward, on a contiguous gradient"
"""What to do. `torch.distributed.nn.functional` is no help: over Gloo its all_gather gives wrong gradients where the
incoming one is strided (torch 2.15)."""


def other_mode(made: Comparison, first: Quantity) -> Cause | None:
    name = of_module(first)
    in_a, in_b = (any(name in facts["in_training"] for facts in run.facts[first.step]) for run in (made.a, made.b))
    if in_a == in_b:
        return None
    return Cause(
        f"{name or 'the model'} is in training mode in run {'A' if in_a else 'B'} alone",
        "model.train() is missing, or an evaluation in between has left model.eval() behind.",
    )


def dropout(made: Comparison, first: Quantity) -> Cause | None:
    name = of_module(first)
    masks = [facts["masks"].get(name) for facts in made.b.facts[first.step]]
    if not any(masks):
        return None
    if len(masks) > 1 and all(mask == masks[0] for mask in masks):
        return Cause(
            f"{name}: every rank draws the same dropout",
            "seeds are equal on all ranks, and so are the masks of their samples: seed with the rank after the model "
            "is built (trap 13).",
        )
    return Cause(
        f"{name} draws other masks in run B",
        "that is as it should be: other ranks have other seeds. To compare what follows, set dropout to 0 in both "
        "runs.",
    )


def batch_statistics(made: Comparison, first: Quantity) -> Cause | None:
    kinds = [run.first["kinds"].get(of_module(first), "") for run in (made.a, made.b)]
    if "BatchNorm" not in kinds[0] or "Sync" in kinds[1]:
        return None
    return Cause(
        f"{first.name} ({kinds[0]}) normalizes over the samples of a micro-batch",
        "smaller micro-batches and other ranks give other statistics. SyncBatchNorm takes those of all ranks; "
        "LayerNorm and GroupNorm need none (trap 11).",
    )


def other_precision(made: Comparison, first: Quantity) -> Cause | None:
    for one in made.of(first.step, OUTPUT):
        a, b = one.dtypes
        if a != b:
            return Cause(
                f"{one.name or 'the model'} answers in {a} in run A, and in {b} in run B",
                "autocast, a mixed-precision policy or param_dtype of one run alone. Compare in one precision (trap "
                "20).",
            )
    return None


def other_buffers(made: Comparison, first: Quantity) -> Cause | None:
    """What ranks have in their buffers when a forward pass begins."""
    ranks = some_ranks(first)
    apart = [name for name, spread in made.buffers.get(first.step - 1, {}).items() if spread > first.limit]
    if not ranks or not apart:
        return None
    return Cause(
        f"buffer {apart[0]} is not the same on all ranks, and the output of {first.name} differs on rank "
        f"{listed(ranks)}",
        "buffers are not sent from rank 0 before forward: broadcast_buffers=False, or a loop that calls the bare "
        "module (trap 11).",
    )


def by_place(made: Comparison, first: Quantity) -> Cause | None:
    """Which ranks are different, and by which factor."""
    where = f"the {first.kind} of {first.name or 'the model'}"
    factor = first.one_factor
    if factor is not None and (named := factor_name(made, factor)):
        return Cause(
            f"{where} is x {factor:.4g}: {named}",
            "a sum over ranks that all hold the whole, or one that is missing: what is cut over ranks is summed "
            "once, and a bias is added once.",
        )
    if ranks := some_ranks(first):
        return Cause(
            f"{where} differs on rank {listed(ranks)} alone",
            "this module's weights or inputs there are not those of the others: another branch, a mask, or positions "
            "that begin at 0 on each rank.",
        )
    return None


def partial_sums(made: Comparison, first: Quantity) -> Cause | None:
    """Of layers whose inputs are cut over ranks."""
    outputs = made.of(first.step, OUTPUT)
    before = outputs[: outputs.index(first)]
    cut = {one.name for one in made.of(made.steps[0], START) if one.way == "parts"}
    if first.way == "sum" or f"{of_module(first)}.weight" in cut:
        has_bias = any(one.name == f"{of_module(first)}.bias" for one in made.of(made.steps[0], START))
        return Cause(
            f"what the ranks have as output of {first.name} does not add up to run A's",
            ("a bias that each rank adds before the sum: add it once, after it. Or " if has_bias else "")
            + "parts that do not belong together: a fused weight (query, key and value; gate and up) that is cut as "
            "one, heads that are dealt otherwise than those of the layer before; or a part that is missing.",
        )
    if not before or before[-1].way != "sum":
        return None
    return Cause(
        f"the output of {before[-1].name} is a part of a sum on each rank, and {first.name}, which comes next, differs",
        f"the all-reduce between them is missing: sum the output of {before[-1].name} over the ranks.",
    )


def of_cut_samples(made: Comparison, first: Quantity) -> Cause | None:
    if not made.b.is_cut or first.way != "parts":
        return None
    return Cause(
        f"each rank has a part of every sample, and makes another output of {first.name} of it",
        "positions that begin at 0 on each rank, a causal mask of the part alone, or attention that does not see the "
        "keys of other ranks.",
    )


def backward(made: Comparison, first: Quantity) -> Cause | None:
    """All outputs agree."""
    gradients = made.of(first.step, OUTPUT_GRADIENT)
    if first is gradients[0]:
        return Cause(
            f"outputs agree, and the loss gives another gradient to that of {first.name or 'the model'}",
            "a collective within the loss that autograd does not see, as torch.distributed.all_gather or all_reduce "
            f"({SEEN}). Or another loss: labels that are shifted after the cut, other tokens left out, or other "
            "weights.",
        )
    if (found := other_scalar(made, first.step)) is not None:
        return found
    after = gradients[gradients.index(first) - 1].name
    return Cause(
        f"outputs agree, and the gradient goes wrong in backward between {after} and {first.name}",
        f"a collective that autograd does not see ({SEEN}), an input of cut layers whose gradient is not summed over "
        "ranks, a detach(), or the backward of a Function.",
    )


def other_scalar(made: Comparison, step: int) -> Cause | None:
    """A loss or a term of it that a module answers with. Each rank has that of its samples: their mean is compared."""
    of_a, of_b = made.a.table(step), made.b.table(step)
    for place in of_a.places:
        rows = [(of, of.places[place]) for of in (of_a, of_b) if place.kind == OUTPUT and place in of.places]
        if len(rows) < 2 or any((of.elements[at] > 1).any() or of.key[at].any() for of, at in rows):
            continue
        a, b = (of.moments[at, 0].mean() for of, at in rows)
        if a and (named := factor_name(made, b / a)):
            return Cause(
                f"what {place.name or 'the model'} answers, a number, is x {b / a:.4g}: {named}; and gradients differ",
                "a term of the loss, as that of an even load, is divided by ranks where the reduction averages "
                "already, or by a count of all ranks beside a sum of this one.",
            )
    return None


RULES: list[Rule] = [other_mode, dropout, batch_statistics, other_buffers, by_place, partial_sums, of_cut_samples]
OF_GRADIENTS: list[Rule] = [other_mode, by_place, backward]


def buffer(made: Comparison, first: Quantity) -> Cause | None:
    assert first.kind == BUFFER
    others = made.of(first.step, BUFFER)
    mean = f"{first.name.rpartition('.')[0]}.running_mean".lstrip(".")
    if first.name.endswith("running_var") and any(one.name == mean and not one.differs for one in others):
        return Cause(
            f"buffer {first.name} differs, and {mean} agrees",
            "the variance is divided by n where BatchNorm keeps that by n - 1, or by the n of a rank: multiply it by "
            "n / (n - 1), of all ranks.",
        )
    return Cause(
        f"buffer {first.name} of rank 0 differs",
        "it is made of the samples of a rank or a micro-batch, as running statistics are (trap 11); or it is updated "
        "once a micro-batch instead of once a step, as averages of weights are.",
    )
