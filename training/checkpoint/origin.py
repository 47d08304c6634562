"""Where a run goes on from: which checkpoint, whether it is whole, and whether this run may follow it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TensorInfo,
    checkpoints_in,
    read_manifest,
    several,
    verify_files,
)
from training.config import LATEST, RunConfig, flag_name
from training.distributed import Ranks, from_rank0, on_every_rank
from training.errors import UserError

MUST_EQUAL = (
    "workload",
    "model",
    "dataset",
    "train_samples",
    "global_batch_size",
    "lr",
    "clip_grad_norm",
    "seed",
    "precision",
    "compress",
    "depth",
    "width",
)
"""Settings that decide which steps follow. With another one a run would be neither the old nor a new one."""
MAY_DIFFER = (
    "choice",
    "grad_accum_steps",
    "epochs",
    "max_steps",
    "bucket_cap_mb",
    "overlap_optimizer",
    "find_unused_parameters",
    "device",
    "backend",
)
"""Settings that decide how steps are computed, or how many. What has changed stands in the run record."""

DECIDE_BUCKETS = {"choice", "world_size", "device", "backend", "grad_accum_steps", "bucket_cap_mb", "overlap_optimizer"}
"""Of these settings: where one has changed, buckets are fitted anew."""


@dataclass(frozen=True)
class Origin:
    """A whole checkpoint that a run goes on from. `skipped`: newer ones beside it, with what is wrong with each."""

    path: Path
    manifest: Manifest
    skipped: Mapping[Path, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.manifest.step


def checkpoint_folder(config: RunConfig) -> Path:
    """The folder of a run's checkpoints: what is asked for, or `checkpoints/<choice>` beside `profile/`."""
    return Path(config.checkpoint_dir or Path(config.output_dir) / "checkpoints" / config.choice)


def current_job() -> str | None:
    """What stays the same when `torchrun` starts the ranks of a job again, and differs between jobs."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{job}/{os.getppid()}" if job == "none" else job  # the name of all jobs that were given none


def find_origin(config: RunConfig, ranks: Ranks) -> Origin | None:
    """The checkpoint that this run goes on from, if any; checked by all ranks, each a part of its files. Collective.

    A run that `torchrun` has started again goes on from its own latest checkpoint, whatever it went on from at first.

    Raises:
        UserError: on every rank: there is none where one is asked for, it is damaged, or the folder for this run's own
            checkpoints holds others, which it would mix up with its own.
    """
    folder = checkpoint_folder(config)
    if config.checkpoint_every and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        own = newest_whole(folder, ranks)
        if isinstance(own, Origin) and own.manifest.job == from_rank0(current_job):
            return own
    origin = None
    if config.resume == LATEST:
        origin = require_found(newest_whole(folder, ranks), folder)
    elif config.resume is not None:
        origin = named(Path(config.resume), ranks)
    if config.checkpoint_every:
        from_rank0(lambda: require_no_others(folder, origin))
    return origin


def named(path: Path, ranks: Ranks) -> Origin:
    """The checkpoint in `path`, or the newest whole one of the checkpoints in it. Collective.

    Raises:
        UserError: on every rank, where there is none.
    """
    holds_others = from_rank0(lambda: path.is_dir() and not (path / MANIFEST).exists() and bool(checkpoints_in(path)))
    return require_found(newest_whole(path, ranks), path) if holds_others else checked(path, ranks)


def checked(path: Path, ranks: Ranks) -> Origin:
    """The checkpoint in `path`, of which nothing is missing or damaged. Collective.

    Raises:
        UserError: on every rank, where something is.
    """

    def check() -> Manifest:
        manifest = read_manifest(path)
        verify_files(path, manifest, ranks.rank, ranks.world_size)
        return manifest

    return Origin(path, on_every_rank(check))


def newest_whole(folder: Path, ranks: Ranks) -> Origin | dict[Path, str]:
    """The newest checkpoint in `folder` of which nothing is missing or damaged, or what is wrong with each."""
    problems: dict[Path, str] = {}
    for _, path in from_rank0(lambda: checkpoints_in(folder)):
        try:
            return replace(checked(path, ranks), skipped=problems)
        except UserError as error:
            problems[path] = str(error)
    return problems


def require_found(found: Origin | dict[Path, str], folder: Path) -> Origin:
    if isinstance(found, Origin):
        return found
    reason = f" ({several(list(found.values()))})" if found else ""
    raise UserError(
        f"--resume: no complete checkpoint in {folder}{reason}; leave --resume out to start from the beginning"
    )


def require_no_others(folder: Path, origin: Origin | None) -> None:
    """Refuse a folder with checkpoints that this run does not go on from.

    Raises:
        UserError: names the newest.
    """
    skipped = origin.skipped if origin else ()
    others = [(step, path) for step, path in checkpoints_in(folder) if path not in skipped and has_manifest(path)]
    if not others:
        return
    step, newest = others[0]
    if origin is None:
        raise UserError(
            f"{folder} holds checkpoints of an earlier run, the newest of step {step}; go on from it with "
            "--resume latest, or give another --checkpoint-dir"
        )
    if not newest.samefile(origin.path):
        raise UserError(
            f"{folder} holds a checkpoint of step {step} that this run does not go on from; remove it, or give another "
            "--checkpoint-dir"
        )


def has_manifest(path: Path) -> bool:
    """Whether a folder has a whole manifest; without one it is worth nothing to anybody."""
    try:
        read_manifest(path)
    except UserError:
        return False
    return True


def require_same_settings(manifest: Manifest, config: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings.

    Raises:
        UserError: names each that differs, with both values.
    """
    different = [
        f"{flag_name(name)} was {manifest.config.get(name)} and is {config[name]}"
        for name in MUST_EQUAL
        if manifest.config.get(name) != config[name]
    ]
    if different:
        raise UserError(f"--resume: this is another training than the checkpoint's: {several(different, 12)}")


def changed_settings(manifest: Manifest, config: Mapping[str, Any], world_size: int) -> dict[str, list[Any]]:
    """What of `MAY_DIFFER`, and of the number of ranks, has changed: [then, now]."""
    then, now = manifest.config | {"world_size": manifest.world_size}, {**config, "world_size": world_size}
    return {n: [then.get(n), now[n]] for n in (*MAY_DIFFER, "world_size") if then.get(n) != now[n]}


def require_same_model(
    manifest: Manifest, parameters: Mapping[str, TensorInfo], buffers: Mapping[str, TensorInfo], optimizer: str
) -> None:
    """Refuse a checkpoint of another model or optimizer.

    Raises:
        UserError: names parameters that are missing, unknown or of another shape or dtype.
    """
    problems = differences(manifest.parameters, parameters) + differences(manifest.buffers, buffers)
    if problems:
        raise UserError(f"--resume: the checkpoint is of another model: {several(problems)}")
    if manifest.optimizer != optimizer:
        raise UserError(f"--resume: the checkpoint is of optimizer {manifest.optimizer}, and this run's is {optimizer}")


def differences(stored: Mapping[str, TensorInfo], wanted: Mapping[str, TensorInfo]) -> list[str]:
    """Sentences on what has to be the same and is not."""

    def describe(info: TensorInfo) -> str:
        return f"{tuple(info.shape)} {info.dtype}{' that trains' if info.trains else ''}"

    problems = [f"it lacks {name}" for name in wanted if name not in stored]
    problems += [f"it has {name}, which the model lacks" for name in stored if name not in wanted]
    return problems + [
        f"{name} is {describe(stored[name])} there and {describe(info)} here"
        for name, info in wanted.items()
        if name in stored and stored[name] != info
    ]
