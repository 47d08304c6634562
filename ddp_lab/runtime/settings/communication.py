"""What ranks send over, and how long they wait."""

from dataclasses import dataclass
from functools import partial

from ddp_lab.runtime.link.speed import NONE, canonical
from ddp_lab.runtime.settings.field import flag
from ddp_lab.strategy.options import AUTO

NCCL, LEGACY_NCCL = "nccl", "nccl-legacy"
"""Torch's names for its NCCL backend and for the class that was it before (docs/cuda.md)."""
BACKENDS = ("auto", "gloo", NCCL, LEGACY_NCCL)

_communication = partial(flag, "communication")


@dataclass(frozen=True)
class CommunicationSettings:
    """The backend, and links that are slower than the machine's."""

    backend: str = _communication(
        AUTO, "auto is NCCL with CUDA and Gloo without; nccl-legacy is torch's older NCCL class", choices=BACKENDS
    )
    share_gpu: bool = _communication(
        False, "let ranks share GPUs where a node has more ranks than GPUs, over NCCL too (docs/gpu.md)"
    )
    link: str = _communication(
        NONE,
        "give each rank a link of this rate and latency, without a GPU: 1gbit, or 250mbit,50us; none is the machine as "
        "it is (docs/link.md)",
        normal=canonical,
        metavar="RATE[,LATENCY]",
    )
    outer_link: str | None = _communication(
        None,
        "with --link and --nodes, give each rank a second link of this rate and latency, for what goes between nodes",
        normal=canonical,
        metavar="RATE[,LATENCY]",
    )
    nodes: int | None = _communication(
        None, "with --outer-link, on how many nodes the ranks are taken to be, neighbours together", at_least=2
    )
    timeout_minutes: float = _communication(
        10.0, "how long a collective may wait for a missing rank, in minutes", above_zero=True
    )
