"""The pretended cluster: devices, how many of them in each node, and the links between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from ddp_lab.planner.contracts import CAUSAL, CONTIGUOUS, SCATTERED, OperatorCall
from ddp_lab.runtime.errors import UserError

CONVOLUTIONS = "aten.convolution"
"""Torch computes these as TF32 by default (`torch.backends.cudnn.allow_tf32`), but not products of matrices."""
HALF = ("bfloat16", "float16")
ATTENTION = "scaled_dot_product"
"""What its operators' names have in them."""
FULL_HEAD = 128
"""Features of a head from which on kernels of attention are as fast as they get."""
EFFICIENT = 0.6
"""What torch's memory-efficient attention, which takes a mask, reaches of what FlashAttention does: assumed."""
MOST_RANKS = 2**20


@dataclass(frozen=True)
class Link:
    """What carries bytes between two neighbours.

    Attributes:
        latency_s: From the start of a transfer to its first byte.
        bytes_per_s: Rate of one transfer that has the link to itself, in one direction.
        source: Where the figures are from.
        peers: Neighbours among which it is divided, so that a group with fewer has only a part of it.
        cards: How many are side by side.
        slower_per_doubling: By how much longer a ring takes for a byte with each doubling of its nodes.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    source: str = ""
    peers: int = 1
    cards: int = 1
    slower_per_doubling: float = 0.0


@dataclass(frozen=True)
class Attention:
    """What attention reaches of the peak rate for matrices: a part x S / (S + `half`) for S tokens, with heads of 128
    features.

    Attributes:
        forward, backward: The part for long sequences.
        half: The length at which it is half of that.
        narrower: Power of the width by which narrower heads are slower.
    """

    forward: float
    backward: float
    half: float
    narrower: float = 0.0

    def part(self, call: OperatorCall) -> float:
        """Of the peak rate."""
        is_backward, is_fused = "backward" in call.name, "efficient" not in call.name
        *_, length, width = call.shapes[0]
        part = self.backward if is_backward else self.forward
        part *= length / (length + self.half) * min(1.0, width / FULL_HEAD) ** self.narrower
        return part if is_fused else part * EFFICIENT


@dataclass(frozen=True)
class Device:
    """A device that computes. Its costs of operators are a roofline (Williams, Waterman and Patterson, "Roofline: an
    insightful visual performance model for multicore architectures", 2009), with rates by kind of operator.

    Attributes:
        kind: `cuda` or `cpu`.
        memory_bytes: What a rank may hold.
        flops_per_s: What a large matrix product reaches, by dtype name (`float32`, `bfloat16`, ...).
        bytes_per_s: What an operator reaches, by its access (`contracts.ACCESSES`).
        launch_s: What an operator takes besides. An operator that touches no element takes nothing: no kernel runs.
        source: Where the figures are from.
        elements_per_s: What an operator reaches that handles one element at a time.
        attention: None: as matrix products.
        peak: Rates for matrices of which `attention` has parts, as `flops_per_s`.
        host_s: What the host takes to issue an operator, while the device computes.
        on_memory: Where the figures of operators on memory are from.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    bytes_per_s: Mapping[str, float]
    launch_s: float = 0.0
    source: str = ""
    elements_per_s: float = float("inf")
    attention: Attention | None = None
    peak: Mapping[str, float] = field(default_factory=dict)
    host_s: float = 0.0
    on_memory: str = ""

    def seconds(self, call: OperatorCall) -> float | None:
        """A launch, and the larger of what arithmetic and what memory takes. None if there is no rate for the dtype."""
        if not call.bytes_moved:
            return 0.0
        arithmetic = 0.0
        if call.flops:
            flops_per_s = self._flops_per_s(call)
            if flops_per_s is None:
                return None
            arithmetic = call.flops / flops_per_s
        elif call.access == SCATTERED:
            arithmetic = max(map(prod, call.shapes), default=0) / self.elements_per_s
        rate = self.bytes_per_s.get(call.access, self.bytes_per_s[CONTIGUOUS])
        return self.launch_s + max(arithmetic, call.bytes_moved / rate)

    def _flops_per_s(self, call: OperatorCall) -> float | None:
        """Of flops as torch counts them, with all that a causal mask makes superfluous."""
        rates, dtype = self.flops_per_s, call.dtypes[0]
        if dtype == "float32" and call.name.startswith(CONVOLUTIONS) and "tfloat32" in rates:
            dtype = "tfloat32"
        if dtype not in rates:
            return None
        if self.attention is None or ATTENTION not in call.name:
            return rates[dtype]
        needed = 0.5 if call.access == CAUSAL else 1.0
        return (self.peak[dtype] * self.attention.part(call) if dtype in HALF else rates[dtype]) / needed

    def compiled(self, fused: Mapping[str, float], host_s: float) -> "Device":
        """The device where a compiler fuses operators. Those on memory take a part of the time, by their access."""
        rates = {access: rate / fused[access] for access, rate in self.bytes_per_s.items()}
        elements_per_s = self.elements_per_s / fused[SCATTERED]
        return replace(self, bytes_per_s=rates, elements_per_s=elements_per_s, host_s=host_s)


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
