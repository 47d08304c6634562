"""One run of a sweep: its command line, whether it has begun before, and torchrun in this process."""

import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.families import Family
from training.cli import parse_config
from training.config import RunConfig


@dataclass(frozen=True)
class Runs:
    """What the runs of a sweep have in common.

    Attributes:
        checkpoint_dir: Root of their checkpoints, if it is given.
        flags: What is passed on as it is.
    """

    family: Family
    ranks: int
    output_dir: Path
    checkpoint_dir: Path | None
    flags: list[str]

    def arguments(self, choice: str) -> list[str]:
        """The run's own command line."""
        arguments = ["--ddp-choice", choice, "--output-dir", str(self.output_dir), *self.flags]
        if self.checkpoint_dir is not None:  # a folder is one run's
            arguments += ["--checkpoint-dir", str(self.checkpoint_dir / choice)]
        return arguments

    def config(self, choice: str) -> RunConfig:
        """Leaves the process with one line where the flags make no sense."""
        return parse_config("", self.family.registry.sentences, ("--ddp-choice",), self.arguments(choice))

    def has_begun(self, choice: str) -> bool:
        """Whether a run that was interrupted has left checkpoints, and this one would go on from them.

        Raises:
            UserError: the folder cannot be read.
        """
        from training.checkpoint.manifest import checkpoints_in
        from training.checkpoint.origin import checkpoint_folder

        config = self.config(choice)
        return config.checkpoint_every is not None and bool(checkpoints_in(checkpoint_folder(config)))


def train(choice: str, ranks: int, arguments: list[str], output_dir: Path) -> bool:
    """Run one choice under torchrun, here in this process, and say in a line why it failed if it did."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from training.process.loopback import torchrun_on_loopback

    logging.disable(logging.ERROR)  # torchrun reports a failed rank at length; the choice's own line says enough
    with tempfile.TemporaryDirectory(prefix="ddp-lab-") as log_dir, torchrun_on_loopback() as flags:
        flags += [f"--nproc_per_node={ranks}", "--log-dir", log_dir, "--redirects", "2"]
        try:
            torchrun([*flags, *arguments])
        except ChildFailedError:
            logs = [path.read_text(errors="replace") for path in sorted(Path(log_dir).rglob("stderr.log"))]
            print(failure_line(choice, logs, output_dir), file=sys.stderr)
            return False
    return True


def failure_line(choice: str, logs: list[str], output_dir: Path) -> str:
    """The choice's own error line; for anything unforeseen the last line of a rank, and where the rest is kept."""
    lines = [line for log in logs for line in log.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("error: ")]
    if own:
        return own[0]
    log_path = output_dir / f"{choice}.failed.log"
    try:
        log_path.write_text("\n".join(logs))
    except OSError as error:
        return f"error: {choice}: {lines[-1] if lines else 'failed'} (log not kept: {error.strerror})"
    return f"error: {choice}: {lines[-1] if lines else 'failed without a word'} (all of it: {log_path})"
