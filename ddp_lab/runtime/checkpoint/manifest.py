"""The manifest of a checkpoint, `manifest.json`, and the folders of checkpoints (`docs/checkpoints.md`).

The manifest is written last. It holds the size and checksum of every other file, and its own checksum. A checkpoint is
complete if its folder has its final name, its manifest is whole, and its files agree with the manifest.
"""

import json
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch.distributed as dist

from ddp_lab.runtime.checkpoint.files import FileInfo, problem_of
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import on_every_rank
from ddp_lab.strategy.model_parallel import Cut
from ddp_lab.writing import sync, to_json, written_whole

FORMAT = 5
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 30
"""In bytes. A longer one is not read."""
FOLDER = re.compile(r"step_(\d{8,15})")
Count = Annotated[int, msgspec.Meta(ge=0)]
RankCount = Annotated[int, msgspec.Meta(ge=1)]


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole tensor of the model: its shape, torch's name of its dtype, and whether it is trainable."""

    shape: list[Count]
    dtype: str
    trains: bool


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a checkpoint holds, and which run saved it. `docs/checkpoints.md` explains each field."""

    format: int = FORMAT
    step: Count
    choice: str = ""
    world_size: RankCount
    data_parallel_size: RankCount
    run_id: str = ""
    job: str | None = None
    config: dict[str, Any] = {}
    versions: dict[str, str] = {}
    optimizer: str
    parameter_groups: list[dict[str, float | list[float]]]
    parameters: dict[str, TensorInfo]
    buffers: dict[str, TensorInfo]
    cuts: dict[str, Cut]
    train_loss: list[float | None] = []
    step_samples: list[int] = []
    step_time_s: list[float | None] = []
    states: dict[str, str] = {}
    files: dict[str, FileInfo] = {}


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def file_name(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest` with its own checksum, whole or not at all."""
    content = msgspec.to_builtins(manifest)
    with written_whole(folder / MANIFEST) as temporary:
        temporary.write_text(to_json(content | {"crc32": _checksum(content)}))
    sync(folder)


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    # what is there
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, which a checkpoint does not contain")
    if not folder.is_dir():
        raise UserError(f"{folder} is no checkpoint: no such folder")
    if not path.is_file():
        raise UserError(f"{folder} is no complete checkpoint: it has no {MANIFEST}")
    try:
        if path.stat().st_size > LARGEST_MANIFEST:
            raise ValueError(f"it has more than {LARGEST_MANIFEST} bytes")
        # format and checksum, before any field is read
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        version = content.get("format")
        if type(version) is not int:
            raise ValueError(f"its format is {version!r}, not the number {FORMAT}")
        if version != FORMAT:
            raise UserError(f"{folder} is a checkpoint of format {version}, but this program reads format {FORMAT}")
        if content.pop("crc32", None) != _checksum(content):
            raise ValueError("its checksum crc32 differs")
        manifest = msgspec.convert(content, Manifest)
        # what fields say of one another
        lengths = {len(manifest.train_loss), len(manifest.step_samples), len(manifest.step_time_s)}
        if manifest.run_id and lengths != {manifest.step}:
            raise ValueError("step: its lists are not as long as there were steps")
        size = len(manifest.files)
        if size != manifest.world_size or manifest.files.keys() != set(map(file_name, range(size))):
            raise ValueError(
                f"files: they are not those of {manifest.world_size} ranks, but {several([*manifest.files])}"
            )
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.ValidationError) as error:
        problem = " ".join(str(error).splitlines())
        raise UserError(f"{folder} is damaged: {MANIFEST} cannot be understood: {problem}") from error
    return manifest


def verify_files(folder: Path, manifest: Manifest, rank: int, size: int) -> None:
    """Compare a checkpoint's files with its manifest. Each rank reads some of the files."""
    for name in sorted(manifest.files)[rank::size]:
        problem = problem_of(folder / name, manifest.files[name])
        if problem:
            raise UserError(f"{folder} is damaged: {problem}")


def complete_manifest(folder: Path, group: dist.ProcessGroup | None = None) -> Manifest:
    """The manifest of a checkpoint whose files agree with it. Each rank of `group` checks some of them. Collective."""

    def check() -> Manifest:
        manifest = read_manifest(folder)
        verify_files(folder, manifest, dist.get_rank(group), dist.get_world_size(group))
        return manifest

    return on_every_rank(check, group)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the checkpoint in a problem with it, which may quote what is in its files."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{' '.join(str(error).splitlines())} ({path})") from error


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything in `folder` that has the name of a checkpoint, newest first.

    Refuses something else than a folder of such a name: skipped, it would stand in the way when this step is saved.
    """
    try:
        folders = [(FOLDER.fullmatch(path.name), path) for path in folder.iterdir()] if folder.exists() else []
        named = [(int(match[1]), path) for match, path in folders if match]
        foreign = [path for _, path in named if path.is_symlink() or not path.is_dir()]
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from error
    if foreign:
        kind = "a symbolic link; to resume from there, name the folder itself" if foreign[0].is_symlink() else "a file"
        raise UserError(f"{foreign[0]} has the name of a checkpoint, but is {kind}; move it away")
    return sorted(named, reverse=True)


def remove_older(folder: Path, step: int, keep: int) -> None:
    """Remove all but the `keep` newest of the checkpoints in `folder`. Those of steps after `step` do not count."""
    for _, path in [entry for entry in checkpoints_in(folder) if entry[0] <= step][keep:]:
        removed = path.with_name(f".{path.name}.removed")
        path.rename(removed)  # without this, a kill could leave a half of it under its name
        shutil.rmtree(removed)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed runs have left in `folder`, half written or half removed."""
    for path in folder.iterdir():
        if path.name.startswith(".step_"):
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def several(items: Sequence[str], most: int = 3) -> str:
    more = len(items) - most
    return "; ".join(items[:most]) + (f"; and {more} more" if more > 0 else "")
