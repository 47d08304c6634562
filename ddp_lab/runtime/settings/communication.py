"""What ranks send over, and how long they wait."""

from dataclasses import dataclass
from functools import partial

from ddp_lab.runtime.link.speed import NONE, canonical
from ddp_lab.runtime.mesh import EXPERT
from ddp_lab.runtime.settings.field import AUTO, MAY_DIFFER, TIME, flag, given, has_value
from ddp_lab.runtime.settings.mesh import PYTORCH, above_one

NCCL, LEGACY_NCCL = "nccl", "nccl-legacy"
"""Torch's names for its NCCL backend and for the class that was it before (docs/cuda.md)."""
BACKENDS = (AUTO, "gloo", NCCL, LEGACY_NCCL)
UNPACED = tuple(
    condition.because("whose all-to-alls it cannot pace")
    for condition in (above_one(EXPERT), has_value("context_parallel", PYTORCH))
)
"""What `--link` does not go with."""

_communication = partial(flag, "communication", resume=MAY_DIFFER)


@dataclass(frozen=True)
class CommunicationSettings:
    """The backend, and links that are slower than the machine's."""

    backend: str = _communication(
        AUTO,
        "auto is NCCL with CUDA and Gloo without; nccl-legacy is torch's older NCCL class",
        choices=BACKENDS,
    )
    share_gpu: bool = _communication(
        False,
        "let ranks share GPUs where a node has more ranks than GPUs, over NCCL too (docs/gpu.md)",
    )
    link: str = _communication(
        NONE,
        "give each rank a link of this rate and latency, without a GPU: 1gbit, or 250mbit,50us; none is the machine as "
        "it is (docs/link.md)",
        normal=canonical,
        metavar="RATE[,LATENCY]",
        excludes=UNPACED,
        affects=(TIME,),
        head="Every rank had a link of {link} (--link): a collective ended no earlier than such links could have "
        "delivered it.",
        trials=(NONE, "1gbit"),
    )
    outer_link: str | None = _communication(
        None,
        "with --link and --nodes, give each rank a second link of this rate and latency, for what goes between nodes",
        normal=lambda rate: None if rate == NONE else canonical(rate),
        metavar="RATE[,LATENCY]",
        needs=(given("link"), given("nodes")),
        affects=(TIME,),
        head="Between its {nodes} nodes it had one of {outer_link} (--outer-link).",
        trials=(None, "250mbit,50us"),
    )
    nodes: int | None = _communication(
        None,
        "with --outer-link, on how many nodes the ranks are taken to be, neighbours together",
        at_least=2,
        needs=(given("outer_link"),),
        affects=(TIME,),
    )
    timeout_minutes: float = _communication(
        10.0, "how long a collective may wait for a missing rank, in minutes", resume=None
    )

    @property
    def fits_link(self) -> bool:
        """Whether `--link` can pace all that the mesh sends."""
        return not any(condition.test(getattr(self, name)) for condition in UNPACED for name in condition.names)
