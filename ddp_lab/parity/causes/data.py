"""Other samples, or other weights to begin with."""

from collections import Counter
from itertools import chain, combinations, product

from ddp_lab.parity.causes.cause import Cause, and_others, listed, some_ranks
from ddp_lab.parity.comparison import Comparison, Quantity
from ddp_lab.parity.store import Place

ROUNDED = 2**-8
"""Relative: bf16 rounds by less."""
CUTTING = ("tp", "cp", "pp")
"""Dimensions of a mesh whose ranks have the same samples."""


def other_data(made: Comparison, step: int) -> Cause | None:
    """Which samples each run sees in a step, in any order."""
    of_a, of_b = made.a.samples(step), made.b.samples(step)
    a, b = (sorted({key for keys in ranks for key in keys}) for ranks in (of_a, of_b))
    if not a or not b:
        return None
    if a == b:
        return repeated(of_a, of_b, step) if made.first is not None else None  # else they have no weight
    missing, new = set(a) - set(b), set(b) - set(a)
    where = f"step {step}: {len(missing)} of {len(a)} samples of run A are missing in run B"
    shared = [(len(set(of_b[i]) & set(of_b[j])), i, j) for i, j in combinations(range(len(of_b)), 2)]
    count, i, j = max(shared, default=(0, 0, 0))
    if count and set(of_b[i]) == set(of_b[j]):
        return Cause(
            f"data: rank {i} and rank {j} train on the same samples; {where}",
            "the sampler's rank: without a DistributedSampler, or with a wrong rank, ranks read the same part of the "
            "data. Give it the data-parallel rank and size (trap 17).",
        )
    if count and set(a) & set(b):
        return Cause(
            f"data: rank {i} and rank {j} share {count} samples; {where}",
            "the sampler: each rank shuffles with a seed of its own, so that parts overlap and samples are left out. "
            "Use one seed, and set_epoch(epoch) on every rank (trap 6).",
        )
    if not new:
        return Cause(f"data: {where}", "samples are dropped: drop_last, or a batch that the ranks do not divide.")
    seen = {key for one in made.a.steps for keys in made.a.samples(one) for key in keys}
    if new <= seen:
        return Cause(
            f"data: run B takes samples of other steps; {where}",
            "another order: another seed of the shuffle, no set_epoch, or another global batch size.",
        )
    return Cause(
        f"data: run B sees {len(new)} samples that run A does not; {where}",
        "other data or another seed of the shuffle; or samples are made ready in another way.",
    )


def repeated(of_a: list[list[int]], of_b: list[list[int]], step: int) -> Cause | None:
    """Some samples count more often than others. Ranks that cut a model between them all have the same."""
    times_a, times_b = (Counter(chain.from_iterable(ranks)) for ranks in (of_a, of_b))
    times = [times_b[key] / times_a[key] for key in times_a]
    often = sum(one > min(times) for one in times)
    if not often:
        return None
    return Cause(
        f"data: run B has {often} of {len(times)} samples of step {step} more often than the others",
        "a sampler that fills the last batch up with samples it has had, so that ranks have equally many "
        "(DistributedSampler without drop_last): give them no weight, or drop what ranks do not divide.",
    )


def other_samples_in_a_group(made: Comparison, step: int) -> Cause | None:
    """Ranks that cut layers or tokens between them must have the same samples."""
    degrees, of_b = made.b.first.get("mesh", {}), made.b.samples(step)
    seen: dict[tuple[int, ...], int] = {}
    for rank, place in enumerate(product(*(range(degree) for degree in degrees.values()))):
        data = tuple(at for name, at in zip(degrees, place, strict=True) if name not in CUTTING)
        other = seen.setdefault(data, rank)
        if degrees and set(of_b[rank]) != set(of_b[other]):
            names = " and ".join(name for name in degrees if name in CUTTING)
            return Cause(
                f"data: ranks {other} and {rank} are of one group of {names}, and have other samples in step {step}",
                "the sampler's rank: it must be the data-parallel rank, the same for all ranks that cut a layer or a "
                "sequence between them (trap 17).",
            )
    return None


def untied(made: Comparison, first: Quantity) -> Cause | None:
    for tied in made.a.first["ties"]:
        if tied not in made.b.first["ties"] and first.name in tied:
            return Cause(
                f"{' and '.join(tied)} are one parameter in run A, and two in run B",
                "a wrapper or a copy has untied them: tie them after the model is moved or loaded, and wrap both in "
                "one unit (trap 7).",
            )
    return None


def other_dtype(made: Comparison) -> Cause | None:
    """Of parameters, as the optimizer updates them."""
    of_a, of_b = (run.first.get("dtypes", {}) for run in (made.a, made.b))
    names = [name for name in of_a if of_b.get(name, of_a[name]) != of_a[name]]
    if not names:
        return None
    a, b = of_a[names[0]], of_b[names[0]]
    return Cause(
        f"{names[0]}{and_others(names)} is {a} in run A, and {b} in run B",
        "one run casts its parameters, and the optimizer updates them as they are: an update that is small beside its "
        "parameter rounds away. Keep fp32 parameters, and compute under autocast or a mixed precision (trap 20).",
    )


def other_shape(made: Comparison, first: Quantity) -> Cause | None:
    """Ranks have whole copies of a tensor, or cut it: together as many elements as run A's, a number of times."""
    place = Place(first.kind, first.name)
    of_a, of_b = (run.table(first.step) for run in (made.a, made.b))
    whole, together = (float(of.elements[of.places[place]].sum()) for of in (of_a, of_b))
    if made.a.ranks > 1 or together % whole == 0:
        return None
    largest = of_b.elements[of_b.places[place]].max()
    return Cause(
        f"{first.name} has {whole:,.0f} elements in run A, and {largest:,.0f} on a rank of run B",
        "one run has another shape: a vocabulary that is filled up to a multiple, as tensor parallelism wants it, or "
        "other settings of the model. Build both alike, and leave out what fills up.",
    )


def other_start(made: Comparison, first: Quantity) -> Cause | None:
    if first.worst < ROUNDED:
        return Cause(
            f"{first.name} is nearly the same at the start: off by {first.worst:.1g} of its norm",
            "it was cast to a lower precision and back: model.to(bfloat16) casts buffers, too. Keep in fp32 what must "
            "be exact, such as rotary frequencies.",
        )
    if ranks := some_ranks(first):
        which = f"the weights of rank {listed(ranks)} differ"
    elif first.spread > first.limit:
        which = "the weights of the ranks are not the same"
    else:
        return Cause(
            "the runs start from other weights",
            "another seed, checkpoint or initialization; or a wrapper that initializes anew (after meta).",
        )
    return Cause(
        f"{which} at the start",
        "nobody has sent rank 0's weights to all: seed every rank alike, or broadcast (trap 12). DDP does so when it "
        "is built; what changes after that stays different.",
    )
