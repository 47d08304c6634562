"""The runs of a sweep over a family."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_lab.families import Family
from ddp_lab.runtime.config import RunConfig, checkpoint_folder, labelled
from ddp_lab.runtime.errors import UnsupportedError, UserError
from ddp_lab.runtime.flags import gives, parse_config
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.settings.mesh import LEGACY_NCCL
from ddp_lab.sweep.meshes import mesh_flags, mesh_labels

ONCE = ("--checkpoint-every", "--checkpoint-async", "--keep-last", "--generate", "--prompt")
"""Flags that only the first pass takes, since it checkpoints and generates for all."""


@dataclass(frozen=True)
class Runs:
    """What the runs of a sweep have in common.

    Attributes:
        checkpoint_dir: Root of their checkpoints, if it is given.
        flags: Flags of the entrypoint, passed to each run.
        on_gpu: Whether the ranks train on GPUs.
    """

    family: Family
    ranks: int
    output_dir: Path
    checkpoint_dir: Path | None
    flags: list[str]
    on_gpu: bool = False

    def gives(self, *names: str) -> bool:
        """Whether the user has given one of these flags."""
        return gives(self.flags, *names)

    def names(self) -> list[str]:
        """The choices; on meshes without `--mesh`, labels, which also name the mesh."""
        if not self.family.on_meshes or self.gives("--mesh"):
            return self.family.registry.swept
        return mesh_labels(self.ranks)

    def labels(self) -> list[str]:
        """Labels of all runs: those of `names`, and where torch has two NCCL classes, runs over the older one."""
        registry = self.family.registry
        labels = [self.config(name).label for name in self.names()]
        if self.on_gpu:
            from ddp_lab.runtime.distributed import has_two_nccl_classes  # imports torch

            if has_two_nccl_classes(self.config(registry.names[0])):
                labels += [labelled(name, LEGACY_NCCL) for name in registry.on_legacy_nccl]
        return labels

    def arguments(self, label: str, number: int = 1) -> list[str]:
        """The command line of a choice's run in a pass, counted from 1."""
        choice, *settings = label.split("@")
        flags = self.flags if number == 1 else ["--no-eval", *without(ONCE, self.flags)]
        arguments = ["--ddp-choice", choice, "--output-dir", str(self.output_dir), *flags]
        for setting in settings:
            arguments += ["--backend", setting] if setting == LEGACY_NCCL else mesh_flags(setting)
        if self.checkpoint_dir is not None and number == 1:  # each run needs its own folder
            arguments += ["--checkpoint-dir", str(self.checkpoint_dir / label)]
        return arguments

    def config(self, label: str, number: int = 1) -> RunConfig:
        """The settings of a choice's run in a pass. Exits with one line where the flags make no sense."""
        arguments = self.arguments(label, number)
        return parse_config("", self.family.registry, arguments=arguments, prog="ddp-lab sweep", besides=["--passes"])

    def require_fit(self) -> RunConfig:
        """Check that the batch and each mesh fit the ranks, and return the settings of the first run.

        Raises:
            UserError: they do not.
        """
        if self.names() != self.family.registry.swept and self.gives("--sequence-parallel"):
            raise UserError("--sequence-parallel: goes with --mesh; without it, some runs have it and others do not")
        configs = [self.config(name) for name in self.names()]
        for config in configs:
            mesh = Mesh.parse(config.mesh) if config.mesh else None
            if mesh is not None:
                mesh.require_ranks(self.ranks, self.ranks)
            config.micro_batch_size(config.data_size(self.ranks))
        return configs[0]

    def refusal(self, label: str) -> str:
        """Why this run's choice cannot do what the flags ask for; empty if it can."""
        from ddp_lab.runtime.share_gpu import PARTS_HANG, shares  # imports torch

        config = self.config(label)
        strategy = self.family.registry.load(config.choice)
        try:
            strategy.supports.require(config.strategy)
            mesh = Mesh.parse(config.mesh) if config.mesh else None
            strategy.supports.require_mesh(mesh)
        except UnsupportedError as error:
            return str(error)
        if mesh and mesh.has_parts and config.backend != "gloo" and shares(config, self.ranks):
            return PARTS_HANG
        return ""

    def has_begun(self, label: str) -> bool:
        """Whether an interrupted run has left checkpoints from which this run would continue.

        Raises:
            UserError: the folder cannot be read.
        """
        from ddp_lab.runtime.checkpoint.manifest import checkpoints_in

        config = self.config(label)
        return config.checkpoint_every is not None and bool(checkpoints_in(checkpoint_folder(config)))


def without(names: Sequence[str], flags: Sequence[str]) -> list[str]:
    """`flags` without the flags `names` and their values."""
    other_flags, stays = [], True
    for flag in flags:
        stays = flag.split("=")[0] not in names if flag.startswith("--") else stays
        other_flags += [flag] * stays
    return other_flags
