"""Kinds of collectives: how they are called, and how much of its payload each sends.

The payload of a call is, as in nccl-tests (doc/PERFORMANCE.md), the tensor for all-reduce, broadcast and reduce, and
the whole (gathered or scattered) tensor for the others.
"""

import re

LABELS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "reduce": "reduce",
    "send_recv": "send or receive",
    "other": "other",
}
"""The kinds that tables show, in display order, and how people call them; barriers and gathers are `other`."""
MESSAGE = "send_recv"
"""Both ends of a message between two ranks."""
ENDS = frozenset(("send", "recv"))
"""One rank does what another does not. Two ranks number them apart."""
UNEVEN = ENDS | {"all_to_all"}
"""Ranks may issue different sizes, or nothing at all."""
_IN_NAMES = (
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "scatter", "gather", "reduce"),
    *("barrier", "send", "recv"),
)


def kind_of(name: str) -> str:
    """The kind in a name that torch, Gloo or NCCL gives, such as `_ALLGATHER_BASE` or `ncclDevKernel_AllReduce_Sum`;
    empty if there is none, and the first of `_IN_NAMES` if there are several."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for kind in _IN_NAMES if kind.replace("_", "") in plain), "")


def label(kind: str, made_of: str = "") -> str:
    """How people call it: `reduce-scatter (as 2 scatters)`."""
    return LABELS.get(kind, kind) + (f" (as {made_of})" if made_of else "")


def sent_share(kind: str, ranks: float) -> float:
    """The share of its payload that a rank sends, of all ranks the mean: the least that the kind needs. NaN if unknown.

    Whoever asks for it: what carries it may send more, as Gloo's reduce-scatter does, which is an all-reduce.
    """
    if kind in ("broadcast", "reduce"):
        return (ranks - 1) / ranks
    share = bus_factor(kind, ranks)
    return share / ranks if kind in ("scatter", "gather") else {MESSAGE: 1 / 2, "barrier": 0.0}.get(kind, share)


def bus_factor(kind: str, ranks: float) -> float:
    """Busbw over algbw (nccl-tests, doc/PERFORMANCE.md); NaN for other kinds and groups of unknown size."""
    fraction = (ranks - 1) / ranks
    factors = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather"), fraction)
    return {**factors, "all_reduce": 2 * fraction, "broadcast": 1.0, "reduce": 1.0}.get(kind, float("nan"))
