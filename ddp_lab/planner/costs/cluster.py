"""The pretended cluster: devices, how many of them in each node, and the links between them."""

from dataclasses import dataclass

from ddp_lab.planner.contracts import OperatorCall
from ddp_lab.runtime.errors import UserError

CONVOLUTIONS = "aten.convolution"
"""Torch computes these as TF32 by default (`torch.backends.cudnn.allow_tf32`), but not products of matrices."""
MOST_RANKS = 2**20


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
    """A device that computes. Its costs of operators are a roofline (Williams, Waterman and Patterson, "Roofline: an
    insightful visual performance model for multicore architectures", 2009).

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

    def seconds(self, call: OperatorCall) -> float | None:
        """A launch, and the larger of what arithmetic and what memory takes. None if there is no rate for the dtype."""
        if not call.bytes_moved:
            return 0.0
        compute = 0.0
        if call.flops:
            rates, dtype = self.flops_per_s, call.dtypes[0]
            if dtype == "float32" and call.name.startswith(CONVOLUTIONS) and "tfloat32" in rates:
                dtype = "tfloat32"
            if dtype not in rates:
                return None
            compute = call.flops / rates[dtype]
        return self.launch_s + max(compute, call.bytes_moved / self.bytes_per_s)


@dataclass(frozen=True)
class Host:
    """The memory of a node, as one of its ranks sees it.

    Attributes:
        bytes_per_s: Of reads and writes together, of one of the ranks that share it.
        copy_bytes_per_s: Between pinned memory and a device.
        source: Where the figures are from.
    """

    bytes_per_s: float
    copy_bytes_per_s: float
    source: str = ""

    def copy_seconds(self, bytes_moved: int) -> float:
        """What a copy takes that moves so many bytes, those read and those written counted apart."""
        return bytes_moved / 2 / self.copy_bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines of `ranks_per_node` devices each.

    Attributes:
        inside: Between the devices of a node.
        between: Between nodes, shared by all ranks of a node; None if there is one node.
        backend: `nccl` or `gloo`: how collectives are carried out.

    Raises:
        UserError: several nodes without a link between them, or too many devices.
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
        if self.world_size > MOST_RANKS:
            raise UserError(f"{self.world_size} devices: at most {MOST_RANKS} are planned for")

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def nodes_of(self, ranks: tuple[int, ...]) -> int:
        """How many nodes these ranks are on."""
        return len({rank // self.ranks_per_node for rank in ranks})
