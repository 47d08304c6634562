"""Saves a checkpoint: every rank writes its file, perhaps in the background, and rank 0 makes a checkpoint of them.

Ranks write into `.step_<k>.saving/`. When the file of a rank is on disk, the rank writes a small JSON file beside it.
From then on the rank touches the folder no more. So ranks need not communicate while they train. When all ranks have
done so, rank 0 writes the manifest and renames the folder to `step_<k>/`. Only then does the checkpoint exist, and only
then are older ones removed.
"""

import fcntl
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO

import msgspec
import torch
from torch import Tensor

from ddp_lab.runtime.checkpoint.files import FileInfo, TensorFiles, write_tensors
from ddp_lab.runtime.checkpoint.manifest import (
    Manifest,
    file_name,
    folder_name,
    remove_older,
    remove_unfinished,
    write_manifest,
)
from ddp_lab.runtime.checkpoint.state import states_in
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import from_rank0, on_every_rank
from ddp_lab.writing import sync, written_whole

LOCK = ".lock"
LAST_WAIT_S = 10.0
"""A run that ends early waits so long for a checkpoint that is being written."""
POLL_S = 0.05


class Saver:
    """Saves into a folder, which belongs to this run alone until `close`. Keeps the newest `keep` checkpoints; None:
    all."""

    def __init__(self, folder: Path, ranks: RankContext, in_background: bool, keep: int | None) -> None:
        self.folder, self._ranks, self._in_background, self._keep = folder, ranks, in_background, keep
        self._lock: IO[bytes] | None = None
        from_rank0(self._claim)
        on_every_rank(self._require_seen)
        self._staged: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._deadline = float("inf")
        self._step = 0

    def _claim(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / LOCK).open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it, however this process ends
            remove_unfinished(self.folder)
        except BlockingIOError:
            raise UserError(
                f"another run is saving checkpoints in {self.folder}; give another --checkpoint-dir"
            ) from None
        except OSError as error:
            raise UserError(f"cannot write checkpoints into {self.folder}: {error.strerror}") from error

    def _require_seen(self) -> None:
        if not (self.folder / LOCK).exists():
            raise UserError(f"{self.folder} is not seen here: --checkpoint-dir must be one folder for all ranks")

    def save(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], manifest: Manifest) -> None:
        """Save this rank's `tensors`. Rank 0's `manifest` counts, which does not have its files yet. Collective.

        In the background: returns when the save before is complete and the tensors are copied.
        """
        self.settle()
        self._step = manifest.step
        self._unfinished = self.folder / f".{folder_name(self._step)}.saving"
        self._written: Future[None] = Future()
        self._committed: Future[None] = Future()
        if self._in_background:
            tensors = self._stage(tensors)
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        self._thread = threading.Thread(target=self._save, args=(tensors, metadata, manifest), daemon=True)
        self._thread.start()
        if not self._in_background:
            self.settle()

    def settle(self) -> None:
        """Wait until the save in the background is complete. Collective."""
        if self._thread is None:
            return
        try:
            self._require_success(self._written)
        except BaseException:
            self._deadline = 0.0  # rank 0 stops waiting for the others
            raise
        finally:
            self._thread.join()
            self._thread = None
        self._require_success(self._committed)

    def close(self) -> None:
        """The run ends, well or not: wait for a save that is under way, and release the folder.

        Not collective, because after an error ranks may never meet again.
        """
        if self._thread is not None:
            self._deadline = time.monotonic() + LAST_WAIT_S
            self._thread.join(LAST_WAIT_S)
            self._thread = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory. The next save uses the same memory."""
        on_gpu = self._ranks.device.type == "cuda"
        staged = {}
        for key, tensor in tensors.items():
            target = self._staged.get(key)
            if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
                target = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=on_gpu)
            staged[key] = target.copy_(tensor, non_blocking=on_gpu)
        self._staged = staged
        return staged

    def _save(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], manifest: Manifest) -> None:
        """The body of the thread."""
        resolve(self._written, lambda: write_part(self._unfinished, self._ranks.rank, tensors, metadata))
        resolve(self._committed, lambda: self._commit(manifest) if self._ranks.is_main else None)

    def _require_success(self, outcome: Future[None]) -> None:
        def check() -> None:
            try:
                outcome.result()
            except OSError as error:
                earlier = "earlier ones are kept" if self.folder.exists() else "the folder has gone"
                reason = f"{error.strerror or error}; {earlier}"
                raise UserError(f"step {self._step}: cannot save a checkpoint in {self.folder}: {reason}") from error

        try:
            on_every_rank(check)
        except Exception:
            if self._ranks.is_main:
                shutil.rmtree(self._unfinished, ignore_errors=True)  # on a full disk, other files need the room
            raise

    def _commit(self, manifest: Manifest) -> None:
        target = self.folder / folder_name(self._step)
        is_whole = commit(self._unfinished, target, manifest, lambda: time.monotonic() <= self._deadline)
        if is_whole and self._keep is not None:
            remove_older(self.folder, self._step, self._keep)


def write_part(folder: Path, rank: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a rank's file into the folder of an unfinished checkpoint."""
    folder.mkdir(exist_ok=True)
    info = write_tensors(folder / file_name(rank), tensors, metadata)
    sync(folder)
    # The last touch: as soon as all ranks' files are seen, rank 0 may rename the folder.
    with written_whole(folder / done_name(rank)) as done_file:
        done_file.write_bytes(msgspec.json.encode(info))


def commit(folder: Path, target: Path, manifest: Manifest, may_wait: Callable[[], bool]) -> bool:
    """Make the checkpoint `target` of what all ranks have written into `folder`, in the place of one that is there.

    Rank 0 does it, and waits for the other ranks here. Returns False when it may wait no longer.
    """
    infos = {}
    for rank in range(manifest.world_size):
        done_path = folder / done_name(rank)
        while not done_path.exists():
            if not may_wait():
                return False
            time.sleep(POLL_S)
        infos[file_name(rank)] = msgspec.json.decode(done_path.read_bytes(), type=FileInfo)
        done_path.unlink()
    states = states_in(TensorFiles([folder / name for name in infos]))
    write_manifest(folder, msgspec.structs.replace(manifest, files=infos, states=states))
    before = target.with_name(f".{target.name}.before")
    if target.exists():
        shutil.rmtree(before, ignore_errors=True)
        target.rename(before)
    folder.rename(target)
    sync(target.parent)
    if before.exists():
        shutil.rmtree(before)
    return True


def resolve(future: Future[None], work: Callable[[], None]) -> None:
    """Do `work`, and give its outcome to `future`."""
    try:
        work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


def done_name(rank: int) -> str:
    """Name of the file that a rank writes when its part is on disk. It holds a `FileInfo`."""
    return f"rank_{rank}.done.json"
