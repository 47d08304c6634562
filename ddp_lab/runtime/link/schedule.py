"""What each rank sends in a collective over Gloo, by the algorithms of Gloo.

In a ring every rank sends to its neighbour all the time, and all ranks end together. In a tree data goes along edges.

Sources: gloo/{allreduce,allgather,broadcast,scatter,gather,barrier,alltoall}.cc; torch's ProcessGroupGloo.cpp, which
makes a reduce-scatter from an all-reduce.
"""

from dataclasses import dataclass
from math import ceil, log2

from ddp_lab.collectives.kinds import sent_share


@dataclass(frozen=True)
class Ring:
    """
    Attributes:
        nbytes: What each rank sends, and receives.
        hops: Messages that wait for one another.
    """

    nbytes: float
    hops: int


@dataclass(frozen=True)
class Edge:
    """One message. `sender` and `receiver` are ranks of the group.

    Attributes:
        is_forwarded: The sender must have received it.
    """

    sender: int
    receiver: int
    nbytes: float
    is_forwarded: bool = False


Schedule = Ring | tuple[Edge, ...]


def all_reduce(size: int, nbytes: float) -> Ring:
    """`nbytes`: of the tensor."""
    return Ring(sent_share("all_reduce", size) * nbytes, 2 * (size - 1))


def all_gather(size: int, nbytes: float) -> Ring:
    """`nbytes`: of what one rank gives.

    Each part goes in two halves. Two ranks have one connection, on which the first halves take turns.
    """
    return Ring(1.5 * nbytes if size == 2 else (size - 1) * nbytes, size - 1)


def barrier(size: int, nbytes: float = 0) -> Ring:
    """Rounds of a dissemination barrier, which sends nothing."""
    return Ring(nbytes, ceil(log2(size)))


def broadcast(size: int, nbytes: float, root: int) -> tuple[Edge, ...]:
    """A binomial tree: in round k, the first 2^k ranks, counted from the root, each send to the one 2^k further."""
    edges = []
    for distance in (1 << k for k in range(ceil(log2(size)))):
        for sender in range(min(distance, size - distance)):
            ends = ((sender + root) % size, (sender + distance + root) % size)
            edges.append(Edge(*ends, nbytes, is_forwarded=sender > 0))
    return tuple(edges)


def message(nbytes: float) -> tuple[Edge, ...]:
    """From one rank to another."""
    return (Edge(0, 1, nbytes),)


def scatter(size: int, nbytes: float, root: int) -> tuple[Edge, ...]:
    """`nbytes`: of what one rank receives."""
    return tuple(Edge(root, receiver, nbytes) for receiver in range(size) if receiver != root)


def gather(size: int, nbytes: float, root: int) -> tuple[Edge, ...]:
    """`nbytes`: of what one rank gives."""
    return tuple(Edge(sender, root, nbytes) for sender in range(size) if sender != root)


def all_to_all(size: int, nbytes: float) -> tuple[Edge, ...]:
    """`nbytes`: of what one rank gives."""
    return tuple(Edge(one, other, nbytes / size) for one in range(size) for other in range(size) if one != other)
