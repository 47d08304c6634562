"""What collectives ask of links, by the algorithms of NCCL and Gloo. n ranks, payload of P bytes:

| kind | NCCL | Gloo |
|---|---|---|
| all_reduce | ring: 2(n-1) hops of P/n | the same |
| all_gather | ring: n-1 hops of P/n | the same |
| reduce_scatter | ring: n-1 hops of P/n | torch's ProcessGroupGloo makes it an all-reduce |
| broadcast | a pipeline along the ring | a binomial tree, of l = log2 n levels |
| reduce | the pipeline the other way | a ring reduce-scatter, then every part to the root |
| scatter, gather | the root sends, or receives, n-1 parts of P/n | the same |
| all_to_all | each rank sends n-1 parts of P/n | the same |
| barrier | an all-reduce of nothing | log2 n rounds (dissemination) |
| messages | P from one rank to another | the same |

In Gloo's tree the root sends its l copies side by side, so that they arrive together, and the first rank that has one
sends l - 1 copies in the same way: l + (l-1) + ... + 1 times P. In its all-to-all, the two ranks of a pair take turns on
their one connection, as if each part went both ways: P instead of (n-1)/n P. Measured over links of 100 Mbit/s, 4 ranks,
2 MiB: broadcast 3.0 P, all-to-all 1.07 P, all-reduce 1.52 P, reduce 1.54 P (formulas: 3, 1, 1.5, 1.5).

Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (ring); NCCL,
src/graph/tuning.cc; Gloo, gloo/{allreduce,allgather,broadcast,reduce,scatter,gather,alltoall,barrier}.cc.
"""

from dataclasses import dataclass
from math import ceil, log2

from training.cli import unknown_name
from training.errors import UserError

MESSAGES = ("send", "recv", "send_recv")
KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "all_to_all",
    "barrier",
    *MESSAGES,
)


@dataclass(frozen=True)
class Volume:
    """What one collective asks of the links of its ranks, each of which sends and receives at once.

    Attributes:
        hops: Messages that wait for one another.
        busiest: Bytes through the link that carries most in one direction, over the payload.
        share: Mean over all links of what each sends, over that.
    """

    hops: int
    busiest: float
    share: float = 1.0


def volume(kind: str, backend: str, ranks: int, on_each_link: int = 1) -> Volume:
    """Of a collective among `ranks`.

    Args:
        kind: One of `KINDS`.
        backend: `nccl` or `gloo`.
        on_each_link: Ranks that share a link, such as a node's. What these send to each other does not count.

    Raises:
        UserError: there is no such kind.
    """
    if kind not in KINDS:
        raise UserError(unknown_name("collective", kind, KINDS))
    links = ceil(ranks / on_each_link)
    if links < 2:
        return Volume(0, 0.0)
    others, levels = (ranks - 1) / ranks, ceil(log2(links))
    away, last = (ranks - on_each_link) / ranks, (links - 1) / links
    ring = Volume(links - 1, others)
    twice = Volume(2 * (links - 1), 2 * others)
    direct = Volume(1, away, 1 / links)
    copies = on_each_link * levels * (levels + 1) / 2
    common = {
        "all_reduce": twice,
        "all_gather": ring,
        "scatter": direct,
        "gather": direct,
        "all_to_all": Volume(1, on_each_link * away),
        **dict.fromkeys(MESSAGES, Volume(1, 1.0, 1 / links)),
    }
    if backend == "gloo":
        gathered = Volume(links, others + away, (others + away / links) / (others + away))
        special = {
            "reduce_scatter": twice,
            "broadcast": Volume(levels, copies, on_each_link * last / copies),
            "all_to_all": Volume(1, on_each_link * away * ranks / (ranks - 1)),
            "reduce": gathered,
            "barrier": Volume(levels, 0.0),
        }
    else:
        pipeline = Volume(links - 1, 1.0, last)
        special = {
            "reduce_scatter": ring,
            "broadcast": pipeline,
            "reduce": pipeline,
            "barrier": Volume(2 * (links - 1), 0.0),
        }
    return {**common, **special}[kind]
