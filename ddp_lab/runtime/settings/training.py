"""How the model is trained, where, what is left on the way and at the end, and which steps are profiled."""

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Self

from ddp_lab.collectives.ranks import Ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.field import (
    AUTO,
    LOSS,
    MAY_DIFFER,
    MUST_EQUAL,
    TIME,
    TRACES,
    TRAFFIC,
    flag,
    flag_name,
    given,
)

DEVICES = (AUTO, "cpu", "cuda")
SCHEDULES = ("constant", "linear", "cosine")
"""Of the learning rate (`ddp_lab.runtime.build.learning_rates`)."""
LOG_TARGETS = ("tensorboard", "wandb")
LATEST = "latest"
SAVES = given("checkpoint_every")

_run, _precision = (partial(flag, group, resume=MUST_EQUAL) for group in ("run", "precision"))
_output, _checkpoints, _profiling = (partial(flag, group) for group in ("run", "checkpoints", "profiling"))


def log_targets(text: str) -> str:
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


def known_ranks(text: str) -> str:
    try:
        Ranks.parse(text)
    except ValueError as error:
        raise UserError(f"{flag_name('profile_ranks')} {text}: {error}") from None
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
        None, "at the end, print N tokens that the language model generates (default: none)", at_least=1
    )
    prompt: str | None = _output(
        None, "the text that --generate continues (default: from the held-out data)", needs=(given("generate"),)
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
        "scale gradients down to this norm over the whole model (default: off)",
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
        None, "save a checkpoint every N optimizer steps, and after the last (docs/checkpoints.md)", at_least=1
    )
    checkpoint_dir: str | None = _checkpoints(
        None,
        "folder of this run's checkpoints (default: checkpoints/<choice> in --output-dir)",
        needs=(given("checkpoint_every", "resume"),),
    )
    checkpoint_async: bool = _checkpoints(
        False, "write checkpoints in the background, from a copy in host memory", needs=(SAVES,)
    )
    keep_last: int | None = _checkpoints(None, "keep only the N newest checkpoints (default: all)", needs=(SAVES,))
    resume: str | None = _checkpoints(
        None,
        "continue from this checkpoint, or from the newest in a folder; without a value, or with latest: from the "
        "newest in --checkpoint-dir; auto: the same, or start from the beginning if there is none",
        alone=LATEST,
    )


@dataclass(frozen=True)
class ProfilingSettings:
    """The profiler and its schedule."""

    no_profile: bool = _profiling(False, "train without torch.profiler and write no traces")
    profile_wait: int = _profiling(
        4,
        "optimizer steps before each profile window, without the profiler; steps in which a strategy settles are "
        "never profiled, and in a short run windows shrink",
        at_least=0,
    )
    profile_warmup: int = _profiling(
        1, "optimizer steps for which the profiler runs but discards its events", at_least=0
    )
    profile_active: int = _profiling(3, "optimizer steps in each profile window")
    profile_repeat: int = _profiling(1, "number of profile windows")
    profile_ranks: str | None = _profiling(
        None,
        "profile these ranks only, such as 0,1,8 or 0-3 (default: all)",
        normal=known_ranks,
        affects=(TRACES,),
        head="Profiled ranks: {profile_ranks}, of {world_size} in all. Figures of traces are theirs, and it is unknown "
        "for which rank a collective waited, and how fast it was.",
        trials=(None, "0-3,8"),
    )

    def profiles(self, rank: int) -> bool:
        chosen = self.profile_ranks is None or rank in Ranks.parse(self.profile_ranks)
        return chosen and not self.no_profile

    def require_profiled_ranks(self, world_size: int) -> None:
        ranks = range(world_size) if self.profile_ranks is None else Ranks.parse(self.profile_ranks)
        if (highest := max(ranks)) >= world_size:
            raise UserError(
                f"--profile-ranks {self.profile_ranks}: there is no rank {highest}; the run has ranks 0 to "
                f"{world_size - 1}"
            )

    def profile_steps(self, settling_steps: int = 0) -> int:
        """Optimizer steps that the profiler's whole schedule takes, after those in which the strategy settles."""
        return self.steps_before_profile(settling_steps) + self.profile_repeat * self._window_steps

    @property
    def _window_steps(self) -> int:
        return self.profile_wait + self.profile_warmup + self.profile_active

    def fitted(self, steps: int, settling_steps: int) -> tuple[Self, str]:
        """With windows that end within `steps` optimizer steps, and what to say of the change; nothing without one.

        Fewer windows come first, then less waiting, then fewer steps in the window. A step to warm up stays if it can.
        """
        steps_needed, steps_left = self.profile_steps(settling_steps), steps - settling_steps
        if self.no_profile or steps_needed <= steps:
            return self, ""
        if steps_left < 1:
            settling = f", of which {settling_steps} settle" if settling_steps else ""
            return replace(self, no_profile=True), f"{steps} steps{settling}: none is left to profile"
        repeat = (steps - self.steps_before_profile(settling_steps)) // self._window_steps
        shorter: dict[str, Any] = {"profile_repeat": max(1, repeat)}
        if repeat < 1:
            active = max(1, min(self.profile_active, steps - max(settling_steps, min(1, self.profile_warmup))))
            warmup = min(self.profile_warmup, steps - active)
            wait = min(self.profile_wait, steps - active - warmup)
            shorter |= {"profile_wait": wait, "profile_warmup": warmup, "profile_active": active}
        instead = " ".join(f"{flag_name(name)} {value}" for name, value in shorter.items())
        note = f"{steps} steps, and the profile would end after {steps_needed}: so {instead}"
        return replace(self, **shorter), note

    def steps_before_profile(self, settling_steps: int) -> int:
        """Optimizer steps before the schedule begins, so that the strategy has settled before the first window."""
        return max(0, settling_steps - self.profile_wait - self.profile_warmup)
