"""How ranks are arranged."""

from dataclasses import dataclass
from functools import partial

from ddp_lab.runtime.mesh import CONTEXT, EXPERT, PIPELINE, TENSOR, Mesh
from ddp_lab.runtime.settings.field import flag

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1 = PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
ZIGZAG = "zigzag"
SOFTMAX, SIGMOID = "softmax", "sigmoid"
CONTEXT_PARALLEL = (RING := "ring", ZIGZAG, ULYSSES := "ulysses", PYTORCH := "pytorch_cp")
_mesh = partial(flag, "mesh")


def canonical_mesh(text: str) -> str:
    """
    Raises:
        UserError: it is no mesh.
    """
    return str(Mesh.parse(text))


@dataclass(frozen=True)
class MeshSettings:
    """The mesh, and how layers are cut over it."""

    mesh: str | None = _mesh(
        None,
        "the ranks by dimension, in any order: dp=2,tp=2, or replicate=2,shard=4 (docs/how-it-works/mesh.md; "
        "default: all ranks see different samples)",
        normal=canonical_mesh,
        metavar="DIMENSION=RANKS,...",
    )
    sequence_parallel: bool = _mesh(
        False, "with tp, each rank also keeps only its part of the tokens between attention and MLP"
    )
    pipeline_schedule: str = _mesh(
        ONE_F_ONE_B,
        "with pp, in which order each rank runs forward and backward of micro-batches, which are --grad-accum-steps "
        "(docs/how-it-works/pipeline_parallel.md)",
        choices=PIPELINE_SCHEDULES,
    )
    stages_per_rank: int = _mesh(
        1,
        "with --pipeline-schedule interleaved, and then at least 2: into how many stages a rank's part is cut",
        at_least=1,
    )
    pipeline_split: str | None = _mesh(
        None,
        "with pp, the number of blocks in each stage (default: cut so that stages cost the same)",
        metavar="N,N,...",
    )
    context_parallel: str = _mesh(
        ZIGZAG,
        "with cp, how attention reaches the tokens of other ranks: keys go around, with tokens in order or so that all "
        "ranks compute equally much, or tokens are exchanged for heads, or by PyTorch's own ring "
        "(docs/how-it-works/context_parallel.md)",
        choices=CONTEXT_PARALLEL,
    )
    router_scores: str = _mesh(
        SOFTMAX,
        "with ep, what routers make of logits: their softmax, or the sigmoid of each over the sum of all",
        choices=(SOFTMAX, SIGMOID),
    )
    router_bias: float | None = _mesh(
        None,
        "with ep, keep the load of experts even by biases that move by so much in a step, instead of by a term of the "
        "loss (docs/how-it-works/expert_parallel.md; default: as the model has it)",
        above_zero=True,
    )
    plan: str | None = _mesh(
        None,
        "TOML file: with tp which module is cut how, for models that have no plan here; with pp which modules are in "
        "each stage (docs/how-it-works/pipeline_parallel.md)",
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
        return bool(self.mesh) and EXPERT in Mesh.parse(str(self.mesh)).degrees

    @property
    def fits_link(self) -> bool:
        """Whether `--link` can pace all that the mesh sends: not all-to-alls of parts of different sizes."""
        return self.degree(EXPERT) == 1 and self.context_parallel != PYTORCH

    def degree(self, dimension: str) -> int:
        """Of the mesh along a dimension; 1 without it."""
        return Mesh.parse(self.mesh).degree(dimension) if self.mesh else 1
