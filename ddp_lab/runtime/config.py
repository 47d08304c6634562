"""All settings of a run, checked when they are built and written beside every trace.

This module imports nothing heavy, so that `--help` answers at once.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.settings.data import BatchSettings, DataSettings
from ddp_lab.runtime.settings.field import check_combinations, check_values, flags_of
from ddp_lab.runtime.settings.mesh import LEGACY_NCCL, ONE_F_ONE_B, ZIGZAG, CommunicationSettings, MeshSettings
from ddp_lab.runtime.settings.training import CheckpointSettings, ProfilingSettings, TrainingSettings
from ddp_lab.strategy.options import StrategyOptions

SEQUENCE_PARALLEL = "-sp"
"""Behind a mesh in the label of a run."""


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
    """One training run. Python takes the fields of the last base first."""

    strategy: StrategyOptions = dataclasses.field(default_factory=StrategyOptions)

    def __post_init__(self) -> None:
        check_values(self)
        check_combinations(FLAGS, self.as_dict())

    @classmethod
    def of(cls, **settings: Any) -> "RunConfig":
        """From the values of flags by name, those of the strategy among them, as `as_dict` gives them."""
        names = {field.name for field in flags_of(StrategyOptions)}
        strategy = StrategyOptions(**{name: settings.pop(name) for name in names & settings.keys()})
        return cls(strategy=strategy, **settings)

    def but(self, **settings: Any) -> "RunConfig":
        return RunConfig.of(**self.as_dict() | settings)

    def as_dict(self) -> dict[str, Any]:
        """The values of all flags by name."""
        return {field.name: getattr(of, field.name) for of in (self, self.strategy) for field in flags_of(of)}

    @property
    def label(self) -> str:
        """Names the run's folders: the choice, followed by its mesh and `nccl-legacy`, so that these never mix:
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


def mesh_setting(label: str) -> str:
    """The mesh in a label, perhaps followed by `SEQUENCE_PARALLEL`; empty if there is none."""
    return next((setting for setting in label.split("@")[1:] if setting != LEGACY_NCCL), "")
