"""Tests of what a step has before backward ends: samples, weights, outputs of modules and their gradients."""

from collections import Counter
from itertools import chain, combinations, product
from typing import Any

import numpy as np

from ddp_lab.parity.causes.look import (
    Look,
    Words,
    and_others,
    factor_name,
    times,
)
from ddp_lab.parity.store import OUTPUT, OUTPUT_GRADIENT, START, Place, Recorded

CUTTING = ("tp", "cp", "pp")
"""Dimensions of a mesh whose ranks have the same samples."""
ROUNDED = 2**-8
"""Relative: bf16 rounds by less."""

# Samples --------------------------------------------------------------------------------------------------------------


def group_has_other_samples(look: Look) -> Words | None:
    """Ranks that cut layers or tokens between them must have the same samples."""
    degrees, of_b = look.comparison.b.first.get("mesh", {}), look.comparison.b.samples(look.step)
    first_ranks: dict[tuple[int, ...], int] = {}
    for rank, place in enumerate(product(*map(range, degrees.values()))) if degrees else ():
        data = tuple(at for name, at in zip(degrees, place, strict=True) if name not in CUTTING)
        first_rank = first_ranks.setdefault(data, rank)
        if set(of_b[rank]) != set(of_b[first_rank]):
            group = " and ".join(name for name in degrees if name in CUTTING)
            return {"other": first_rank, "rank": rank, "group": group}
    return None


def _samples(look: Look) -> tuple[set[int], set[int]]:
    in_a, in_b = (set(chain.from_iterable(run.samples(look.step))) for run in (look.comparison.a, look.comparison.b))
    return in_a, in_b


def samples_differ(look: Look) -> Words | None:
    a, b = _samples(look)
    return {"missing": len(a - b), "all": len(a), "new": len(b - a)} if a and b and a != b else None


def two_ranks_share(look: Look) -> Words | None:
    """The two with most in common."""
    of_ranks = list(map(set, look.comparison.b.samples(look.step)))
    pairs = [(len(of_ranks[i] & of_ranks[j]), i, j) for i, j in combinations(range(len(of_ranks)), 2)]
    shared, i, j = max(pairs, default=(0, 0, 0))
    return {"shared": shared, "i": i, "j": j, "is_all": of_ranks[i] == of_ranks[j]} if shared else None


def two_ranks_share_all(look: Look) -> Words | None:
    words = two_ranks_share(look)
    return words if words and words["is_all"] else None


def some_samples_are_right(look: Look) -> bool:
    a, b = _samples(look)
    return bool(a & b)


def no_sample_is_new(look: Look) -> bool:
    a, b = _samples(look)
    return b <= a


def samples_are_of_other_steps(look: Look) -> bool:
    return _samples(look)[1] <= {
        k for step in look.comparison.a.steps for keys in look.comparison.a.samples(step) for k in keys
    }


def samples_repeat(look: Look) -> Words | None:
    """Some samples count more often than others. Ranks that cut a model between them have the same samples."""
    in_a, in_b = (
        Counter(chain.from_iterable(run.samples(look.step))) for run in (look.comparison.a, look.comparison.b)
    )
    if look.comparison.first is None or not in_a or in_a.keys() != in_b.keys():
        return None  # where nothing differs they have no weight
    counts = [in_b[key] / in_a[key] for key in in_a]
    often = sum(count > min(counts) for count in counts)
    return {"often": often, "all": len(counts)} if often else None


# The start, and precision ---------------------------------------------------------------------------------------------


def parameters_have_other_dtypes(look: Look) -> Words | None:
    """As the optimizer updates them."""
    in_a, in_b = (run.first.get("dtypes", {}) for run in (look.comparison.a, look.comparison.b))
    names = [name for name in in_a if in_b.get(name, in_a[name]) != in_a[name]]
    return {"names": and_others(names), "a": in_a[names[0]], "b": in_b[names[0]]} if names else None


def outputs_have_other_dtypes(look: Look) -> Words | None:
    for output in look.comparison.of(look.step, OUTPUT):
        a, b = output.dtypes
        if a != b:
            return {"output": output.name or "the model", "a": a, "b": b}
    return None


def is_untied(look: Look) -> Words | None:
    for tied in look.comparison.a.first["ties"]:
        if tied not in look.comparison.b.first["ties"] and look.first.name in tied:
            return {"tied": " and ".join(tied)}
    return None


def has_other_shape(look: Look) -> Words | None:
    """Ranks together have no multiple of run A's elements, as they would if they copied or cut the tensor."""
    place = Place(look.first.kind, look.first.name)
    in_a, in_b = (table.elements[table.places[place]] for table in look.tables)
    if look.comparison.a.ranks > 1 or in_b.sum() % in_a.sum() == 0:
        return None
    return {"whole": in_a.sum(), "largest": in_b.max()}


def is_nearly_the_same(look: Look) -> bool:
    return look.first.worst < ROUNDED


def differs_on_some_ranks(look: Look) -> bool:
    return bool(look.ranks)


def ranks_are_apart(look: Look) -> bool:
    return look.first.spread > look.first.limit


# Modules --------------------------------------------------------------------------------------------------------------


def is_in_training_in_one_run(look: Look) -> Words | None:
    in_a, in_b = (look.module in modules for modules in look.facts("in_training"))
    return {"which": "A" if in_a else "B"} if in_a != in_b else None


def _masks(look: Look) -> list[Any]:
    return [facts["masks"].get(look.module) for facts in look.comparison.b.facts[look.step]]


def drops(look: Look) -> bool:
    return any(_masks(look))


def masks_are_alike(look: Look) -> bool:
    first, *other_masks = _masks(look)
    return bool(other_masks) and all(mask == first for mask in other_masks)


def takes_batch_statistics(look: Look) -> Words | None:
    in_a, in_b = (run.first["kinds"].get(look.module, "") for run in (look.comparison.a, look.comparison.b))
    return {"module_class": in_a} if "BatchNorm" in in_a and "Sync" not in in_b else None


def buffers_are_apart(look: Look) -> Words | None:
    """When a forward pass begins."""
    spreads = look.comparison.buffers.get(look.step - 1, {})
    apart = [name for name, spread in spreads.items() if spread > look.first.limit]
    return {"buffer": apart[0]} if apart else None


def is_a_multiple(look: Look) -> bool:
    return look.first.one_factor is not None


def factor_has_a_name(look: Look) -> bool:
    return bool(factor_name(look.comparison, look.first.one_factor or 1.0))


def is_a_partial_sum(look: Look) -> bool:
    """The output is the partial sum of a layer whose inputs are cut over ranks."""
    cut = {start.name for start in look.comparison.of(look.comparison.steps[0], START) if start.way == "parts"}
    return look.first.way == "sum" or f"{look.module}.weight" in cut


def has_a_bias(look: Look) -> bool:
    return any(start.name == f"{look.module}.bias" for start in look.comparison.of(look.comparison.steps[0], START))


def follows_a_partial_sum(look: Look) -> Words | None:
    outputs = look.comparison.of(look.step, OUTPUT)
    before = outputs[: outputs.index(look.first)][-1:]
    return {"before": before[0].name} if before and before[0].way == "sum" else None


def samples_are_cut(look: Look) -> bool:
    return look.comparison.b.is_cut and look.first.way == "parts"


def positions_are_of_other_tokens(look: Look) -> bool:
    """What ranks have of a sample, each token at its position, does not add up to run A's."""
    if not look.facts("has_positions")[1]:
        return False
    tokens, *_ = _tokens(look.comparison.a, look.step)
    return not np.array_equal(np.sum(_tokens(look.comparison.b, look.step), axis=0), tokens)


def _tokens(run: Recorded, step: int) -> list[list[int]]:
    """A number for each sample, by rank."""
    return [list(chain.from_iterable(facts["tokens"])) for facts in run.facts[step]]


def others_agree_before(look: Look) -> Words | None:
    """Gradients of outputs that are nearer to the loss."""
    gradients = look.comparison.of(look.step, OUTPUT_GRADIENT)
    before = gradients[: gradients.index(look.first)]
    return {"after": before[-1].name} if before else None


def a_number_has_a_factor(look: Look) -> Words | None:
    """A module returns a loss or a term of it. Each rank has that of its samples: their mean is compared."""
    of_a, of_b = look.tables
    for place in of_a.places.keys() & of_b.places.keys():
        rows = [(table, table.places[place]) for table in look.tables if place.kind == OUTPUT]
        if not rows or any((table.elements[at] > 1).any() or table.key[at].any() for table, at in rows):
            continue
        a, b = (table.moments[at, 0].mean() for table, at in rows)
        if a and factor_name(look.comparison, b / a):
            return {"number": place.name or "the model", "times": times(look.comparison, b / a)}
    return None
