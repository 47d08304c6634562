"""How the model is trained, where, and what is left at the end."""

import argparse
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from ddp_lab.runtime.settings.field import flag, one_of
from ddp_lab.strategy.options import AUTO

DEVICES = ("auto", "cpu", "cuda")
SCHEDULES = ("constant", "linear", "cosine")
"""Of the learning rate (`ddp_lab.runtime.schedule`)."""
LOG_TARGETS = ("tensorboard", "wandb")

_precision = partial(flag, "precision")
_run = partial(flag, "run")


def log_targets(text: str) -> str:
    """What `--log-to` takes.

    Raises:
        argparse.ArgumentTypeError: a target is unknown, or its package is not installed.
    """
    targets = text.split(",")
    for target in targets:
        one_of(LOG_TARGETS, target)
        if targets.count(target) > 1:
            raise argparse.ArgumentTypeError(f"'{text}' names {target} twice")
        spec = find_spec(target)
        if spec is None or spec.origin is None:  # a folder of this name here, such as W&B's own, is no package
            raise argparse.ArgumentTypeError(f"{target} is not installed; run: uv sync --extra {target}")
    return text


@dataclass(frozen=True)
class TrainingSettings:
    """The optimizer, the device, and what a run writes."""

    tf32: bool = _precision(False, "on GPUs, matrix products of fp32 tensors in TF32: 10 bits of mantissa, but faster")
    generate: int | None = _run(
        None, "at the end, print so many tokens that the language model makes (default: none)", at_least=1
    )
    prompt: str | None = _run(None, "the text that --generate goes on with (default: of the held-out data)")
    lr: float | None = _run(None, "learning rate of AdamW (default: set by the workload)", above_zero=True)
    schedule: str = _run(
        "constant", "learning rate after warm-up: constant, or falling to 0 at the end of the run", choices=SCHEDULES
    )
    warmup_steps: int = _run(0, "first optimizer steps, in which the learning rate rises linearly to --lr", at_least=0)
    clip_grad_norm: float | None = _run(
        None, "scale gradients down to this norm over the whole model (default: do not)", above_zero=True
    )
    seed: int = _run(0, "seed of initial weights, data order and dropout", at_least=0)
    device: str = _run(AUTO, "auto is CUDA if there is a GPU", choices=DEVICES)
    output_dir: str = _run(".", "root folder of profile/")
    log_to: str | None = _run(
        None,
        "also log each step to tensorboard, wandb, or both with a comma between",
        read=log_targets,
        metavar="TARGETS",
    )
