"""The pretended cluster: devices, how many of them in each node, and the links between them."""

from dataclasses import dataclass

from training.errors import UserError


@dataclass(frozen=True)
class Link:
    """What carries bytes between two neighbours.

    Attributes:
        latency_s: From the start of a transfer to its first byte.
        bytes_per_s: Rate of one transfer that has the link to itself, in one direction.
        source: Where the figures are from.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    source: str = ""


@dataclass(frozen=True)
class Device:
    """A device that computes.

    Attributes:
        kind: `cuda` or `cpu`.
        memory_bytes: What a rank may hold.
        flops_per_s: What a large matrix product reaches, by dtype name (`float32`, `bfloat16`, ...).
        bytes_per_s: What a large element-wise operator reaches.
        launch_s: What an operator takes besides. An operator that touches no element takes nothing: no kernel runs.
        source: Where the figures are from.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_s: dict[str, float]
    bytes_per_s: float
    launch_s: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines of `ranks_per_node` devices each.

    Attributes:
        inside: Between the devices of a node.
        between: Between nodes, shared by all ranks of a node; None if there is one node.
        backend: `nccl` or `gloo`: how collectives are carried out.

    Raises:
        UserError: several nodes without a link between them.
    """

    device: Device
    nodes: int
    ranks_per_node: int
    inside: Link
    between: Link | None = None
    backend: str = "nccl"

    def __post_init__(self) -> None:
        if self.nodes > 1 and self.between is None:
            raise UserError(f"{self.nodes} nodes: give the link between them")

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def nodes_of(self, ranks: tuple[int, ...]) -> int:
        """How many nodes these ranks are on."""
        return len({rank // self.ranks_per_node for rank in ranks})
