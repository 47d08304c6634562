"""How much collectives of n ranks send over links, by the algorithms of NCCL and Gloo. The payload is P bytes.

Rings send n-1 parts of P/n, and twice as many for an all-reduce, which is what torch's ProcessGroupGloo makes of a
reduce-scatter. NCCL broadcasts by a pipeline along the ring, Gloo by a binomial tree of l = log2 n levels. There the
root sends its l copies side by side, so that they arrive together, and the first rank that has one sends l-1 copies in
the same way: l + (l-1) + ... + 1 times P. In an all-gather of two ranks over Gloo, the first halves of the parts take
turns on their one connection, so it takes 3/4 P. In an all-to-all each rank sends n-1 parts of P/n at once. Gloo's
barrier takes log2 n rounds (dissemination), and NCCL's is an all-reduce of nothing. docs/planner-costs.md compares this
with measurements.

Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (ring); NCCL,
src/graph/tuning.cc; Gloo, gloo/{allreduce,allgather,broadcast,scatter,barrier}.cc.
"""

from dataclasses import dataclass
from math import ceil, log2

MESSAGE = "send_recv"
"""Between two ranks, for both of its ends."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "scatter", "all_to_all", "barrier", MESSAGE)
"""Those that strategies issue."""


@dataclass(frozen=True)
class Volume:
    """What one collective sends over the links of its ranks. A link sends and receives at once.

    Attributes:
        hops: Messages that wait for one another.
        busiest: Bytes through the link that carries most in one direction, divided by the payload.
        share: Mean over all links of what each sends, divided by `busiest`.
    """

    hops: int
    busiest: float
    share: float = 1.0


def volume(kind: str, backend: str, ranks: int, on_each_link: int = 1) -> Volume:
    """Volume of a collective among `ranks`.

    Args:
        kind: One of `KINDS`.
        backend: `nccl` or `gloo`.
        on_each_link: Ranks that share a link, such as a node's. What these send to each other does not count.
    """
    links = ceil(ranks / on_each_link)
    if links < 2:
        return Volume(0, 0.0)
    others, levels = (ranks - 1) / ranks, ceil(log2(links))
    last = (links - 1) / links
    ring = Volume(links - 1, others)
    twice = Volume(2 * (links - 1), 2 * others)
    common = {
        "all_reduce": twice,
        "all_gather": ring,
        MESSAGE: Volume(1, 1.0, 0.5),
        "all_to_all": Volume(1, on_each_link * (ranks - on_each_link) / ranks),
        "scatter": Volume(1, (ranks - on_each_link) / ranks, 1 / links),
    }
    if backend == "gloo":
        copies = on_each_link * levels * (levels + 1) / 2
        special = {
            "reduce_scatter": twice,
            "all_gather": Volume(1, 0.75, 2 / 3) if ranks == 2 else ring,
            "broadcast": Volume(levels, copies, on_each_link * last / copies),
            "barrier": Volume(levels, 0.0),
        }
    else:
        special = {
            "reduce_scatter": ring,
            "broadcast": Volume(links - 1, 1.0, last),
            "barrier": Volume(2 * (links - 1), 0.0),
        }
    return {**common, **special}[kind]
