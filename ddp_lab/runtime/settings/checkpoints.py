"""When a run is saved, and from where it goes on."""

from dataclasses import dataclass
from functools import partial

from ddp_lab.runtime.settings.field import flag

LATEST = "latest"

_checkpoints = partial(flag, "checkpoints")


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints."""

    checkpoint_every: int | None = _checkpoints(
        None, "save a checkpoint every so many optimizer steps, and after the last (docs/checkpoints.md)", at_least=1
    )
    checkpoint_dir: str | None = _checkpoints(
        None, "folder of this run's checkpoints (default: checkpoints/<choice> in --output-dir)"
    )
    checkpoint_async: bool = _checkpoints(False, "write checkpoints in the background, from a copy in host memory")
    keep_last: int | None = _checkpoints(None, "keep only so many of the newest checkpoints (default: all)", at_least=1)
    resume: str | None = _checkpoints(
        None,
        "continue from this checkpoint, or from the newest in a folder; without a value, or with latest: from the "
        "newest in --checkpoint-dir; auto: the same, or start from the beginning if there is none",
        alone=LATEST,
    )
