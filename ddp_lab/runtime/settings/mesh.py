"""How ranks are arranged, what they send over, and how long they wait."""

from dataclasses import dataclass
from functools import partial

from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.speed import NONE, canonical
from ddp_lab.runtime.mesh import CONTEXT, DATA, EXPERT, PIPELINE, TENSOR, Mesh
from ddp_lab.runtime.settings.field import (
    AUTO,
    LOSS,
    MAY_DIFFER,
    MUST_EQUAL,
    TIME,
    TRAFFIC,
    Condition,
    flag,
    given,
    has_value,
)

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1 = PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
SOFTMAX, SIGMOID = "softmax", "sigmoid"
RING, ZIGZAG, ULYSSES, PYTORCH = CONTEXT_PARALLEL = ("ring", "zigzag", "ulysses", "pytorch_cp")


def degree_of(mesh: str | None, dimension: str) -> int:
    """Ranks of a mesh along a dimension; 1 without it."""
    return Mesh.parse(mesh).degree(dimension) if mesh else 1


def above_one(*dimensions: str) -> Condition:
    """One of these dimensions of the mesh has several ranks."""
    text = f"{' or '.join(dimensions)} above 1"
    return Condition(text, ("mesh",), lambda mesh: any(degree_of(mesh, name) > 1 for name in dimensions))


def has_experts(mesh: str | None) -> bool:
    """Whether a mesh says over which ranks experts are cut, perhaps over one."""
    return bool(mesh) and EXPERT in Mesh.parse(str(mesh)).degrees


TENSOR_PARTS, STAGES, TOKEN_PARTS = (above_one(dimension) for dimension in (TENSOR, PIPELINE, CONTEXT))
EXPERTS = Condition("ep", ("mesh",), has_experts)

NCCL, LEGACY_NCCL = "nccl", "nccl-legacy"
"""Torch's names for its NCCL backend and for the class that was it before (docs/status.md)."""
BACKENDS = (AUTO, "gloo", NCCL, LEGACY_NCCL)
UNPACED = tuple(
    condition.because("whose all-to-alls it cannot pace")
    for condition in (above_one(EXPERT), has_value("context_parallel", PYTORCH))
)
"""What `--link` does not go with."""

_mesh, _communication = (partial(flag, group, resume=MAY_DIFFER) for group in ("mesh", "communication"))


def canonical_mesh(text: str) -> str:
    mesh = Mesh.parse(text)
    if EXPERT in mesh.degrees and not mesh.degrees.keys() <= {DATA, EXPERT, TENSOR}:
        raise UserError(f"--mesh {text}: ep goes with dp and tp alone so far; leave out the other dimensions, or ep")
    return str(mesh)


@dataclass(frozen=True)
class MeshSettings:
    """The mesh, and how layers are cut over it."""

    mesh: str | None = _mesh(
        None,
        "the ranks by dimension, in any order: dp=2,tp=2, or replicate=2,shard=4 (docs/how-it-works/mesh.md; "
        "default: all ranks see different samples)",
        normal=canonical_mesh,
        metavar="DIMENSION=RANKS,...",
        trials=(None, "dp=2,tp=2", "pp=2", "dp=2,ep=2", "cp=2", "replicate=2,shard=2"),
    )
    sequence_parallel: bool = _mesh(
        False,
        "with tp, each rank also keeps only its part of the tokens between attention and MLP",
        needs=(TENSOR_PARTS,),
        excludes=(EXPERTS.because("whose routers see all tokens of a rank"),),
    )
    pipeline_schedule: str = _mesh(
        ONE_F_ONE_B,
        "with pp, the order in which each rank runs forward and backward of the --grad-accum-steps micro-batches "
        "(docs/how-it-works/pipeline_parallel.md)",
        choices=PIPELINE_SCHEDULES,
        needs=(
            STAGES,
            Condition("--stages-per-rank of at least 2", ("stages_per_rank",), lambda n: n > 1, of=(INTERLEAVED,)),
        ),
        excludes=(
            given("activation_checkpointing").because(
                "since a block would be computed again for its inputs, and once more for its weights", of=(ZB_H1,)
            ),
        ),
    )
    stages_per_rank: int = _mesh(
        1,
        "with --pipeline-schedule interleaved, the stages of each rank, at least 2",
        needs=(has_value("pipeline_schedule", INTERLEAVED),),
    )
    pipeline_split: str | None = _mesh(
        None,
        "with pp, the number of blocks in each stage (default: cut so that stages cost the same)",
        metavar="N,N,...",
        needs=(STAGES,),
    )
    context_parallel: str = _mesh(
        ZIGZAG,
        "with cp, how attention reaches the tokens of other ranks: a ring with tokens in order, a ring with "
        "balanced tokens, an exchange of tokens for heads, or PyTorch's ring "
        "(docs/how-it-works/context_parallel.md)",
        choices=CONTEXT_PARALLEL,
        needs=(TOKEN_PARTS,),
    )
    router_scores: str = _mesh(
        SOFTMAX,
        "with ep, the routers' scores: softmax of the logits, or the sigmoid of each over the sum of all",
        choices=(SOFTMAX, SIGMOID),
        needs=(EXPERTS,),
        resume=MUST_EQUAL,
        affects=(LOSS,),
    )
    router_bias: float | None = _mesh(
        None,
        "with ep, balance the load of experts with biases that move by this much per step, instead of with a term "
        "of the loss (docs/how-it-works/expert_parallel.md; default: as in the model)",
        needs=(EXPERTS,),
        resume=MUST_EQUAL,
        affects=(TIME, TRAFFIC, LOSS),
    )
    plan: str | None = _mesh(
        None,
        "TOML file: with tp how each module is cut, for models without a built-in plan; with pp the modules of each "
        "stage (docs/how-it-works/pipeline_parallel.md)",
        needs=(above_one(TENSOR, PIPELINE),),
        excludes=(given("pipeline_split"),),
    )

    @property
    def cuts_layers(self) -> bool:
        """Whether ranks hold parts of the same layers."""
        return self.degree(TENSOR) > 1

    @property
    def has_stages(self) -> bool:
        """Whether ranks hold different layers."""
        return self.degree(PIPELINE) > 1

    @property
    def cuts_tokens(self) -> bool:
        """Whether ranks see parts of the same samples."""
        return self.degree(CONTEXT) > 1

    @property
    def has_experts(self) -> bool:
        """Whether the mesh says over which ranks experts are cut, perhaps over one."""
        return has_experts(self.mesh)

    def degree(self, dimension: str) -> int:
        """Of the mesh along a dimension; 1 without it."""
        return degree_of(self.mesh, dimension)

    def data_size(self, world_size: int) -> int:
        """How many of so many ranks see different samples."""
        return Mesh.parse(self.mesh).data_size if self.mesh else world_size


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
        "with --link and --nodes, give each rank a second link of this rate and latency, for traffic between nodes",
        normal=lambda rate: None if rate == NONE else canonical(rate),
        metavar="RATE[,LATENCY]",
        needs=(given("link"), given("nodes")),
        affects=(TIME,),
        head="Between its {nodes} nodes it had one of {outer_link} (--outer-link).",
        trials=(None, "250mbit,50us"),
    )
    nodes: int | None = _communication(
        None,
        "with --outer-link, the number of simulated nodes; neighbouring ranks share one",
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
