"""How long collectives take: from what n ranks send over links by the algorithms of NCCL and Gloo, and from latency and
rate of links. The payload is P bytes.

Rings send n-1 parts of P/n, and twice as many for an all-reduce, which is what torch's ProcessGroupGloo makes of a
reduce-scatter. NCCL broadcasts by a pipeline along the ring, Gloo by a binomial tree of l = log2 n levels. There the
root sends its l copies side by side, so that they arrive together, and the first rank that has one sends l-1 copies in
the same way: l + (l-1) + ... + 1 times P. In an all-gather of two ranks over Gloo, the first halves of the parts take
turns on their one connection, so it takes 3/4 P. In an all-to-all each rank sends n-1 parts of P/n at once. Gloo's
barrier takes log2 n rounds (dissemination), and NCCL's is an all-reduce of nothing. docs/planner-costs.md compares this
with measurements.

Ranks that are all on one node use the link inside it. Otherwise each node's link to the others counts too: a ring
passes it once in each direction, and groups that run side by side on the same nodes (SPMD) share it.

Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (ring); NCCL,
src/graph/tuning.cc; Gloo, gloo/{allreduce,allgather,broadcast,scatter,barrier}.cc.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, log2

from ddp_lab.collectives.kinds import MESSAGE, sent_share
from ddp_lab.planner.contracts import CollectiveCost, Costs
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.costs.hardware import table

OPERATOR_ERROR, LINK_ERROR = 0.2, 0.3
"""Largest relative errors of the times of operators and of collectives: assumptions."""
BASE_S = {"nccl": 8.4e-6, "gloo": 150e-6}
"""Of every collective: a kernel (NCCL, tuning.cc: ring, Simple); the way to Gloo's thread and back (an estimate)."""
LOW_LATENCY = (0.2, 4.0)
"""NCCL's protocol LL compared with Simple: a hop takes 0.14 to 0.28 of the time, a byte four times (tuning.cc)."""
TREE_SLOWER = 1 / 0.9
"""Time of a byte in NCCL's trees compared with its rings (tuning.cc)."""
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
    """Volume of a collective among `ranks`. `kind`: one of `KINDS`. `backend`: `nccl` or `gloo`. `on_each_link`: ranks
    that share a link, such as a node's. What these send to each other does not count."""
    links = ceil(ranks / on_each_link)
    if links < 2:
        return Volume(0, 0.0)
    levels, last = ceil(log2(links)), (links - 1) / links
    ring = Volume(links - 1, sent_share("all_gather", ranks))
    twice = Volume(2 * (links - 1), sent_share("all_reduce", ranks))
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


@dataclass(frozen=True)
class LinkCosts:
    """Costs on any cluster, with nothing measured: hops x latency + bytes / rate."""

    cluster: Cluster
    slowing_by_card: float = 1.0
    """What a network card slows compute by, as a part of what a collective in a node does."""

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        name, share = self._link_of(kind, ranks)
        between = self.cluster.between if self.cluster.nodes_of(ranks) > 1 else None
        slowing = min(1.0, self.slowing_by_card * between.cards) if between else 1.0
        base = BASE_S[self.cluster.backend]
        candidates = [(base + latency, seconds) for latency, seconds in self._ways(kind, payload_bytes, ranks)]
        return CollectiveCost(*min(candidates, key=sum), name, share, slowing)

    def _link_of(self, kind: str, ranks: tuple[int, ...]) -> tuple[str, float]:
        nodes, backend = self.cluster.nodes_of(ranks), self.cluster.backend
        if nodes > 1 and self.cluster.between is not None:
            return f"between nodes: {self.cluster.between.name}", volume(kind, backend, nodes).share
        return f"inside a node: {self.cluster.inside.name}", volume(kind, backend, len(ranks)).share

    def _ways(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> Iterator[tuple[float, float]]:
        """Seconds of latency and of transfer, for each way in which the backend may do it."""
        cluster, backend = self.cluster, self.cluster.backend
        inside, between = cluster.inside, cluster.between
        nodes, size = cluster.nodes_of(ranks), len(ranks)
        flat, reached = volume(kind, backend, size), min(1.0, (ceil(size / nodes) - 1) / inside.peers or 1.0)
        latency, transfer = flat.hops * inside.latency_s, flat.busiest * payload_bytes / inside.bytes_per_s / reached
        if nodes > 1 and between is not None:
            on_node = ceil(size / nodes)
            side_by_side = cluster.ranks_per_node / on_node
            if kind == MESSAGE:  # of all neighbours so far apart, these few are in two nodes
                side_by_side = min(side_by_side, max(ranks) - min(ranks))
            across = volume(kind, backend, size, on_node)
            through = across.busiest * side_by_side * payload_bytes / between.bytes_per_s
            latency += across.hops * (between.latency_s - inside.latency_s)
            if kind == "all_reduce" and backend == "nccl":
                depth = 2 * ((on_node - 1) * inside.latency_s + ceil(log2(nodes)) * between.latency_s)
                yield depth, max(through, transfer) * TREE_SLOWER
            transfer = max(through * (1 + between.slower_per_doubling * log2(nodes)), transfer)
        yield latency, transfer
        if backend == "nccl":
            yield latency * LOW_LATENCY[0], transfer * LOW_LATENCY[1]


def costs_of(cluster: Cluster, contention: float | None = None, compiles: bool = False, is_cut: bool = False) -> Costs:
    """Costs on a cluster, by the table or by a card's file. `contention`: as in `Costs`. Default: what the table
    assumes for such devices. `compiles`: whether a compiler fuses operators of the model's blocks. `is_cut`: whether a
    mesh cuts the model, for which the host takes longer."""
    device = cluster.device
    kind = table()["operators"][device.kind]
    if compiles and "fused" in kind:
        device = device.compiled(kind["fused"], kind["compiled_host_us"] * 1e-6)
    elif is_cut and "mesh_host_us" in kind:
        device = replace(device, host_s=max(device.host_s, kind["mesh_host_us"] * 1e-6))
    of_operators = f"Operators: roofline of {device.name} ({device.source}); on memory: {device.on_memory}."
    of_links = [f"Link {link.name}: {link.source}." for link in (cluster.inside, cluster.between) if link]
    assumed = table()["contention"].get(device.kind, {"compute": 1.0, "source": "assumed on a CPU"})
    factor, source = (assumed["compute"], assumed["source"]) if contention is None else (contention, "as given")
    by_card = assumed["network_card"] / (assumed["compute"] - 1) if device.kind == "cuda" else 1.0
    slower = f"Contention: compute takes {factor:.2f} times as long beside collectives ({source})."
    sources = (of_operators, *of_links, slower)
    return Costs(device, LinkCosts(cluster, by_card), factor, OPERATOR_ERROR, sources, device.host_s)
