"""How the model is trained, where, and what is left on the way and at the end."""

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.field import (
    AUTO,
    LOSS,
    MAY_DIFFER,
    MUST_EQUAL,
    TIME,
    TRAFFIC,
    flag,
    given,
)

DEVICES = (AUTO, "cpu", "cuda")
SCHEDULES = ("constant", "linear", "cosine")
"""Of the learning rate (`ddp_lab.runtime.build.learning_rates`)."""
LOG_TARGETS = ("tensorboard", "wandb")
LATEST = "latest"
SAVES = given("checkpoint_every")

_run, _precision = (partial(flag, group, resume=MUST_EQUAL) for group in ("run", "precision"))
_output, _checkpoints = partial(flag, "run"), partial(flag, "checkpoints")


def log_targets(text: str) -> str:
    """What `--log-to` takes.

    Raises:
        UserError: a target is unknown, or its package is not installed.
    """
    targets = text.split(",")
    for target in targets:
        if target not in LOG_TARGETS:
            raise UserError(f"'{target}' is none of {', '.join(LOG_TARGETS)}")
        if targets.count(target) > 1:
            raise UserError(f"'{text}' names {target} twice")
        spec = find_spec(target)
        if spec is None or spec.origin is None:  # a folder of this name here, such as W&B's own, is no package
            raise UserError(f"{target} is not installed; run: uv sync --extra {target}")
    return text


@dataclass(frozen=True)
class TrainingSettings:
    """The optimizer, the device, and what a run writes."""

    tf32: bool = _precision(
        False,
        "on GPUs, matrix products of fp32 tensors in TF32: 10 bits of mantissa, but faster",
        resume=MAY_DIFFER,
        affects=(TIME, LOSS),
    )
    generate: int | None = _output(
        None, "at the end, print so many tokens that the language model makes (default: none)", at_least=1
    )
    prompt: str | None = _output(
        None, "the text that --generate goes on with (default: of the held-out data)", needs=(given("generate"),)
    )
    lr: float | None = _run(
        None,
        "learning rate of AdamW (default: set by the workload)",
        affects=(LOSS,),
    )
    schedule: str = _run(
        "constant",
        "learning rate after warm-up: constant, or falling to 0 at the end of the run",
        choices=SCHEDULES,
        affects=(LOSS,),
    )
    warmup_steps: int = _run(
        0,
        "first optimizer steps, in which the learning rate rises linearly to --lr",
        at_least=0,
        affects=(LOSS,),
    )
    clip_grad_norm: float | None = _run(
        None,
        "scale gradients down to this norm over the whole model (default: do not)",
        affects=(TIME, TRAFFIC, LOSS),
    )
    seed: int = _run(
        0,
        "seed of initial weights, data order and dropout",
        at_least=0,
        affects=(LOSS,),
    )
    device: str = _run(AUTO, "auto is CUDA if there is a GPU", choices=DEVICES, resume=MAY_DIFFER)
    output_dir: str = _output(".", "root folder of profile/")
    log_to: str | None = _output(
        None,
        "also log each step to tensorboard, wandb, or both with a comma between",
        normal=log_targets,
        metavar="TARGETS",
        trials=(None, "tensorboard"),
    )


@dataclass(frozen=True)
class CheckpointSettings:
    """When a run is saved, and from where it goes on."""

    checkpoint_every: int | None = _checkpoints(
        None, "save a checkpoint every so many optimizer steps, and after the last (docs/checkpoints.md)", at_least=1
    )
    checkpoint_dir: str | None = _checkpoints(
        None,
        "folder of this run's checkpoints (default: checkpoints/<choice> in --output-dir)",
        needs=(given("checkpoint_every", "resume"),),
    )
    checkpoint_async: bool = _checkpoints(
        False, "write checkpoints in the background, from a copy in host memory", needs=(SAVES,)
    )
    keep_last: int | None = _checkpoints(
        None, "keep only so many of the newest checkpoints (default: all)", needs=(SAVES,)
    )
    resume: str | None = _checkpoints(
        None,
        "continue from this checkpoint, or from the newest in a folder; without a value, or with latest: from the "
        "newest in --checkpoint-dir; auto: the same, or start from the beginning if there is none",
        alone=LATEST,
    )
