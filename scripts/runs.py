"""The two families of strategies, and one run of a sweep over a family."""

import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ddp
import sharding
from training.config import LEGACY_NCCL, RunConfig, labelled, split_label
from training.errors import UnsupportedError
from training.flags import parse_config
from training.registry import Registry


@dataclass(frozen=True)
class Family:
    """One entrypoint, the command that sweeps its choices, and the root folder of their reports."""

    script: str
    sweep: str
    registry: Registry
    report_root: str


FAMILIES = {
    "ddp": Family("main_ddp.py", "run_experiment_ddp.sh", ddp.REGISTRY, "reports"),
    "sharding": Family("main_shard.py", "run_experiment_shard.sh", sharding.REGISTRY, "reports_sharding"),
}


def report_root_of(label: str) -> str:
    """Root folder of the reports on a choice; that of the replicated ones for a choice that no registry has."""
    choice, _ = split_label(label)
    of_choice = (family.report_root for family in FAMILIES.values() if choice in family.registry.sentences)
    return next(of_choice, FAMILIES["ddp"].report_root)


@dataclass(frozen=True)
class Runs:
    """What the runs of a sweep have in common.

    Attributes:
        checkpoint_dir: Root of their checkpoints, if it is given.
        flags: Flags of the entrypoint, passed to each run.
    """

    family: Family
    ranks: int
    output_dir: Path
    checkpoint_dir: Path | None
    flags: list[str]

    def labels(self) -> list[str]:
        """Names of all runs: a run of each choice, and where torch has two NCCL classes, runs over the older one."""
        from training.distributed import has_two_nccl_classes  # imports torch

        registry = self.family.registry
        labels = [self.config(name).label for name in registry.names]
        if has_two_nccl_classes(self.config(registry.names[0])):
            labels += [labelled(name, LEGACY_NCCL) for name in registry.on_legacy_nccl]
        return labels

    def arguments(self, label: str) -> list[str]:
        """The run's own command line."""
        choice, backend = split_label(label)
        arguments = ["--ddp-choice", choice, "--output-dir", str(self.output_dir), *self.flags]
        if backend is not None:
            arguments += ["--backend", backend]
        if self.checkpoint_dir is not None:  # each run needs its own folder
            arguments += ["--checkpoint-dir", str(self.checkpoint_dir / label)]
        return arguments

    def config(self, label: str) -> RunConfig:
        """Exits with one line where the flags make no sense."""
        return parse_config("", self.family.registry, arguments=self.arguments(label))

    def refusal(self, label: str) -> str:
        """Why this run's choice cannot do what the flags ask for; empty if it can."""
        config = self.config(label)
        try:
            self.family.registry.load(config.choice).require_options(config.strategy_options())
        except UnsupportedError as error:
            return str(error)
        return ""

    def has_begun(self, label: str) -> bool:
        """Whether an interrupted run has left checkpoints from which this run would continue.

        Raises:
            UserError: the folder cannot be read.
        """
        from training.checkpoint.manifest import checkpoints_in
        from training.checkpoint.origin import checkpoint_folder

        config = self.config(label)
        return config.checkpoint_every is not None and bool(checkpoints_in(checkpoint_folder(config)))


def train(label: str, ranks: int, arguments: list[str]) -> bool:
    """Run one choice under `torchrun`, in this process; False if it failed, after one line that says why."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from training.process.loopback import torchrun_on_loopback

    logging.disable(logging.ERROR)  # torchrun logs that a rank failed, but not why
    with tempfile.TemporaryDirectory(prefix="ddp-lab-") as log_dir, torchrun_on_loopback() as flags:
        try:
            torchrun([*flags, f"--nproc_per_node={ranks}", "--log-dir", log_dir, *arguments])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if isinstance(failure.message, dict):  # the rank has left an error file
                why = failure.message["message"]
            else:
                why = failure.message if failure.exitcode < 0 else f"exit code {failure.exitcode}"
            if not why.startswith("error: "):  # the rank has not printed it as one line
                print(f"error: {label}: rank {rank} failed: {why}", file=sys.stderr)
            return False
    return True
