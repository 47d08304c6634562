"""The checkpoint that a run resumes from: which one, whether it is complete, and whether this run may continue it."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_lab.runtime.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TensorInfo,
    checkpoints_in,
    complete_manifest,
    read_manifest,
    several,
)
from ddp_lab.runtime.config import FLAGS, RunConfig, checkpoint_folder
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import from_rank0
from ddp_lab.runtime.settings.field import AUTO, MAY_DIFFER, MUST_EQUAL, flag_name
from ddp_lab.runtime.settings.training import LATEST


@dataclass(frozen=True)
class Origin:
    """A complete checkpoint that a run resumes from. `skipped`: newer ones, with what is wrong with each."""

    path: Path
    manifest: Manifest
    skipped: Mapping[Path, str] = field(default_factory=dict)


def current_job() -> str | None:
    """A name that stays the same when `torchrun` restarts the ranks of a job, and differs between jobs."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{job}/{os.getppid()}" if job == "none" else job  # the id of every job without one of its own


def find_origin(config: RunConfig) -> Origin | None:
    """The checkpoint that this run resumes from, if any. Each rank checks a part of its files. Collective.

    A run that `torchrun` has restarted resumes from its own newest checkpoint, wherever it started from at first.
    """
    folder = checkpoint_folder(config)
    if config.checkpoint_every and from_rank0(lambda: int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))):
        with suppress(UserError):  # there is none yet
            newest = newest_complete(folder)
            if newest.manifest.job == from_rank0(current_job):
                return newest
    origin, is_own = None, config.resume in (LATEST, AUTO)
    if config.resume is not None and not (config.resume == AUTO and from_rank0(lambda: not checkpoints_in(folder))):
        path = folder if is_own else Path(config.resume)
        holds_several = from_rank0(lambda: path.is_dir() and not (path / MANIFEST).exists() and checkpoints_in(path))
        origin = newest_complete(path) if is_own or holds_several else complete(path)
    if config.checkpoint_every:
        from_rank0(lambda: require_no_others(folder, origin))
    return origin


def complete(path: Path) -> Origin:
    """The checkpoint of a run in `path`. Collective."""
    manifest = complete_manifest(path)
    if not manifest.run_id:
        raise UserError(f"{path} was saved by a loop of its own; ddp_lab.load_checkpoint loads it")
    return Origin(path, manifest)


def newest_complete(folder: Path) -> Origin:
    """The newest complete checkpoint in `folder`. Collective."""
    problems: dict[Path, str] = {}
    for _, path in from_rank0(lambda: checkpoints_in(folder)):
        try:
            return replace(complete(path), skipped=problems)
        except UserError as error:
            problems[path] = str(error)
    reason = f" ({several(list(problems.values()))})" if problems else ""
    raise UserError(
        f"--resume: no complete checkpoint in {folder}{reason}; leave --resume out to start from the beginning"
    )


def require_no_others(folder: Path, origin: Origin | None) -> None:
    """Check that the folder for this run's checkpoints holds none, or that this run resumes from the newest of them."""
    skipped = origin.skipped if origin else ()
    other_checkpoints = [
        (step, path) for step, path in checkpoints_in(folder) if path not in skipped and has_manifest(path)
    ]
    if not other_checkpoints:
        return
    step, newest = other_checkpoints[0]
    if origin is None:
        raise UserError(
            f"{folder} holds checkpoints of an earlier run, the newest of step {step}; resume from it with "
            "--resume latest, or give another --checkpoint-dir"
        )
    if not newest.samefile(origin.path):
        raise UserError(
            f"{folder} holds a checkpoint of step {step} that this run does not resume from; remove it, or give "
            "another --checkpoint-dir"
        )


def has_manifest(path: Path) -> bool:
    """Whether a folder has a whole manifest. Without one, nobody can use what is in it."""
    try:
        read_manifest(path)
    except UserError:
        return False
    return True


def flags_that(resume: str) -> list[str]:
    """The names of flags whose values `MUST_EQUAL` or `MAY_DIFFER`."""
    return [field.name for field in FLAGS if field.metadata["resume"] == resume]


def require_same_settings(manifest: Manifest, config: Mapping[str, Any]) -> None:
    """Check that the settings that decide results (`MUST_EQUAL`) are those of the checkpoint."""
    different = [
        f"{flag_name(name)} was {manifest.config.get(name)} and is {config[name]}"
        for name in flags_that(MUST_EQUAL)
        if manifest.config.get(name, config[name]) != config[name]  # an earlier version may not know the setting
    ]
    if different:
        raise UserError(f"--resume: this is another training than the checkpoint's: {several(different, 12)}")


def changed_settings(manifest: Manifest, current: Manifest) -> dict[str, list[Any]]:
    """Which settings have changed that decide only how steps are computed, with the number of ranks: [then, now]."""
    then, now = (run.config | {"world_size": run.world_size} for run in (manifest, current))
    return {n: [then.get(n), now.get(n)] for n in (*flags_that(MAY_DIFFER), "world_size") if then.get(n) != now.get(n)}


def require_same_model(manifest: Manifest, current: Manifest) -> None:
    """Check that model and optimizer are those of the checkpoint."""
    problems = differences(manifest.parameters, current.parameters) + differences(manifest.buffers, current.buffers)
    if problems:
        raise UserError(f"--resume: the checkpoint is of another model: {several(problems)}")
    if manifest.optimizer != current.optimizer:
        kinds = f"of optimizer {manifest.optimizer}, and this run's is {current.optimizer}"
        raise UserError(f"--resume: the checkpoint is {kinds}")


def differences(stored: Mapping[str, TensorInfo], expected: Mapping[str, TensorInfo]) -> list[str]:
    """Clauses on what should be the same and is not."""

    def describe(info: TensorInfo) -> str:
        return f"{tuple(info.shape)} {info.dtype}{' that trains' if info.trains else ''}"

    problems = [f"it lacks {name}" for name in expected if name not in stored]
    problems += [f"it has {name}, which the model lacks" for name in stored if name not in expected]
    return problems + [
        f"{name} is {describe(stored[name])} there and {describe(info)} here"
        for name, info in expected.items()
        if name in stored and stored[name] != info
    ]
