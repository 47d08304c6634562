"""All settings of a run, checked when they are built and written beside every trace.

This module imports nothing heavy, so that `--help` answers at once.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_lab.runtime.link.speed import NONE
from ddp_lab.runtime.mesh import DATA, EXPERT, TENSOR, Mesh
from ddp_lab.runtime.settings.batch import BatchSettings
from ddp_lab.runtime.settings.checkpoints import CheckpointSettings
from ddp_lab.runtime.settings.communication import LEGACY_NCCL, CommunicationSettings
from ddp_lab.runtime.settings.data import DataSettings
from ddp_lab.runtime.settings.field import Rules, check, flag_name, flags_of
from ddp_lab.runtime.settings.mesh import INTERLEAVED, ONE_F_ONE_B, PYTORCH, ZB_H1, ZIGZAG, MeshSettings
from ddp_lab.runtime.settings.profiling import ProfilingSettings
from ddp_lab.runtime.settings.training import TrainingSettings
from ddp_lab.strategy.options import FP16, NO_RECOMPUTATION, StrategyOptions

SEQUENCE_PARALLEL = "-sp"
"""Behind a mesh in the label of a run."""


def each_only(holds: Callable[[Any], bool], where: str, *names: str) -> Rules:
    """A rule for each of these flags: where it is given, `holds` must be true; `where` says when that is."""

    def rule(name: str) -> tuple[Callable[[Any], bool], str]:
        return lambda c: holds(c) or c.as_dict()[name] == DEFAULTS[name], f"{flag_name(name)}: must be {where}"

    return [rule(name) for name in names]


RULES: Rules = (
    (
        lambda c: c.outer_link is None or (NONE not in (c.link, c.outer_link) and c.nodes is not None),
        "--outer-link {0.outer_link}: must be a rate, with --link RATE and --nodes",
    ),
    (lambda c: c.nodes is None or c.outer_link is not None, "--nodes {0.nodes}: must be with --outer-link RATE"),
    (lambda c: c.cuts_layers or not c.sequence_parallel, "--sequence-parallel: must be with --mesh and tp above 1"),
    (
        lambda c: c.plan is None or ((c.cuts_layers or c.has_stages) and not c.pipeline_split),
        "--plan {0.plan}: must be with --mesh and tp or pp above 1, and without --pipeline-split",
    ),
    (
        lambda c: not ((c.cuts_layers or c.cuts_tokens) and c.strategy.compile),
        "--compile: must be without tp and cp, whose collectives would be in the graph",
    ),
    (
        lambda c: c.cuts_tokens or c.context_parallel == ZIGZAG,
        "--context-parallel {0.context_parallel}: must be with --mesh and cp above 1",
    ),
    (
        lambda c: c.link == NONE or c.fits_link,
        f"--link {{0.link}}: must be {NONE} with ep and --context-parallel {PYTORCH}, whose all-to-alls it cannot pace",
    ),
    (
        lambda c: not (c.cuts_layers or c.cuts_tokens) or c.strategy.loss_chunks == 1,
        "--loss-chunks {0.strategy.loss_chunks}: must be without tp and cp, over whose ranks a loss is cut already",
    ),
    (
        lambda c: not (c.cuts_layers and c.lora_rank),
        "--lora-rank {0.lora_rank}: must be without tp: no plan names adapters",
    ),
    *each_only(lambda c: c.has_stages, "with --mesh and pp above 1", "pipeline_schedule", "pipeline_split"),
    (
        lambda c: (c.pipeline_schedule == INTERLEAVED) == (c.stages_per_rank > 1),
        "--pipeline-schedule {0.pipeline_schedule} with --stages-per-rank {0.stages_per_rank}: must be at least 2 "
        "stages a rank with interleaved, and 1 with the others",
    ),
    (
        lambda c: c.pipeline_schedule != ZB_H1 or c.strategy.activation_checkpointing == NO_RECOMPUTATION,
        "--pipeline-schedule zb-h1 with --activation-checkpointing: must be one or the other, since a block that is "
        "computed again in backward makes all its gradients at once",
    ),
    *each_only(lambda c: not c.has_stages, "without pp", "compile", "lora_rank"),
    *each_only(lambda c: c.has_experts, "with --mesh and ep", "router_scores", "router_bias"),
    (
        lambda c: not c.has_experts or Mesh.parse(str(c.mesh)).degrees.keys() <= {DATA, EXPERT, TENSOR},
        "--mesh {0.mesh}: ep goes with dp and tp alone so far; leave the other dimensions out, or ep",
    ),
    (
        lambda c: not (c.has_experts and c.sequence_parallel),
        "--sequence-parallel with --mesh {0.mesh}: must be without ep, whose routers see all tokens of a rank",
    ),
    *each_only(
        lambda c: not c.has_experts,
        "without ep",
        *("compile", "compress", "reduce_dtype", "param_dtype", "offload", "lora_rank", "loss_chunks"),
    ),
    (lambda c: c.seed < 2**32, "--seed {0.seed}: must be a whole number from 0 to 4294967295"),
    (
        lambda c: c.strategy.precision == FP16 or not c.strategy.loss_scale,
        f"--loss-scale {{0.strategy.loss_scale}}: must be with --precision {FP16}",
    ),
    (lambda c: c.lora_rank or not c.lora_alpha, "--lora-alpha {0.lora_alpha}: must be with --lora-rank"),
    (lambda c: c.checkpoint_every or not c.checkpoint_async, "--checkpoint-async: must be with --checkpoint-every"),
    (lambda c: c.checkpoint_every or not c.keep_last, "--keep-last {0.keep_last}: must be with --checkpoint-every"),
    (
        lambda c: not c.keep_windows or c.profile_repeat > 1,
        "--keep-windows {0.keep_windows}: must be with --profile-repeat above 1",
    ),
    (
        lambda c: c.checkpoint_every or c.resume or c.checkpoint_dir is None,
        "--checkpoint-dir {0.checkpoint_dir}: must be with --checkpoint-every or --resume",
    ),
    (lambda c: c.generate is not None or c.prompt is None, "--prompt {0.prompt}: must be with --generate"),
)


@dataclass(frozen=True)
class RunConfig(
    TrainingSettings,
    CheckpointSettings,
    ProfilingSettings,
    CommunicationSettings,
    BatchSettings,
    MeshSettings,
    DataSettings,
):
    """One training run. Python takes the fields of the last base first.

    Attributes:
        strategy: What the strategy is told.
    """

    strategy: StrategyOptions = dataclasses.field(default_factory=StrategyOptions)

    def __post_init__(self) -> None:
        check(self, RULES)

    @classmethod
    def of(cls, **settings: Any) -> "RunConfig":
        """From the values of flags by name, those of the strategy among them, as `as_dict` gives them.

        Raises:
            UserError: they make no sense.
        """
        names = {field.name for field in flags_of(StrategyOptions)}
        strategy = StrategyOptions(**{name: settings.pop(name) for name in names & settings.keys()})
        return cls(strategy=strategy, **settings)

    def but(self, **settings: Any) -> "RunConfig":
        """The same with other values of these flags."""
        return RunConfig.of(**self.as_dict() | settings)

    def as_dict(self) -> dict[str, Any]:
        """The values of all flags by name."""
        return {field.name: getattr(of, field.name) for of in (self, self.strategy) for field in flags_of(of)}

    @property
    def label(self) -> str:
        """Names the run's folders: the choice, with its mesh and `nccl-legacy` behind, so that these never mix:
        `zero2@dp2-tp2`, `tp@pp2-interleaved4`."""
        mesh = Mesh.parse(self.mesh).label if self.mesh else None
        if mesh and self.pipeline_schedule != ONE_F_ONE_B:
            mesh += f"-{self.pipeline_schedule}" + (str(self.stages_per_rank) if self.stages_per_rank > 1 else "")
        if mesh and self.context_parallel != ZIGZAG:
            mesh += f"-{self.context_parallel}"
        if mesh and self.sequence_parallel:
            mesh += SEQUENCE_PARALLEL
        return labelled(self.choice, mesh, self.backend if self.backend == LEGACY_NCCL else None)


FLAGS = [*flags_of(RunConfig), *flags_of(StrategyOptions)]
"""The fields that are flags."""
DEFAULTS = {field.name: field.default for field in FLAGS}


def choice_folder(config: RunConfig) -> Path:
    """Where a run leaves its traces and its record."""
    return Path(config.output_dir) / "profile" / config.label


def checkpoint_folder(config: RunConfig) -> Path:
    """The folder of a run's checkpoints: `--checkpoint-dir`, or `checkpoints/<choice>` beside `profile/`."""
    return Path(config.checkpoint_dir or Path(config.output_dir) / "checkpoints" / config.label)


def labelled(choice: str, *settings: str | None) -> str:
    """`<choice>@<setting>...`, without those that are None."""
    return "@".join([choice, *(setting for setting in settings if setting is not None)])


def split_label(label: str) -> tuple[str, str | None]:
    """The choice of `labelled`, and the backend or None."""
    choice, *settings = label.split("@")
    return choice, LEGACY_NCCL if LEGACY_NCCL in settings else None
