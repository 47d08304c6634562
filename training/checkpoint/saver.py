"""Saving: every rank writes its file, in the background if asked for, and rank 0 makes a checkpoint of them.

A checkpoint is written into `.step_<k>.saving/`. When a rank's file is on disk, it says so in a small JSON file of its
own beside it; so no rank has to communicate while training does. When all have, rank 0 writes the manifest and renames
the folder to `step_<k>/`: from that moment the checkpoint exists, and older ones may be removed.
"""

import fcntl
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import msgspec
import torch
from torch import Tensor

from training.checkpoint.files import FileInfo, sync_folder, write_durably, write_tensors
from training.checkpoint.manifest import (
    Manifest,
    file_name,
    folder_name,
    remove_older,
    remove_unfinished,
    write_manifest,
)
from training.distributed import Ranks, from_rank0, on_every_rank
from training.errors import UserError

LOCK = ".lock"
LAST_WAIT_S = 10.0
"""How long a run that ends early waits for a checkpoint that is being written."""
POLL_S = 0.05


class Saver:
    """Saves into a folder, which is this run's alone as long as it lives.

    Args:
        in_background: Copy the tensors, and write while training goes on.
        keep: How many checkpoints to keep; all if None.

    Raises:
        UserError: on every rank, where the folder cannot be written, is another run's, or is not seen by every rank.
    """

    def __init__(self, folder: Path, ranks: Ranks, in_background: bool, keep: int | None) -> None:
        self.folder, self._ranks, self._in_background, self._keep = folder, ranks, in_background, keep
        self._lock: IO[bytes] | None = None
        from_rank0(self._claim)
        on_every_rank(self._require_seen)
        self._staged: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._written = threading.Event()
        self._deadline = float("inf")
        self._problem: Exception | None = None
        self._commit_problem: Exception | None = None
        self._step = 0

    def _claim(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system gives it back, however this ends
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
        """Save this rank's `tensors`; `manifest` (rank 0's counts) still lacks its files. Collective.

        In the background: returns when the tensors are copied, once the save before is complete.

        Raises:
            UserError: on every rank, where this save failed, or the one before did in the background.
        """
        self.settle()
        self._step = manifest.step
        self._written.clear()
        self._problem = self._commit_problem = None
        if not self._in_background:
            self._write(tensors, metadata)
            self._require_written()
            from_rank0(lambda: self._commit(manifest))
            self._require_committed()
            return
        staged = self._stage(tensors)

        def work() -> None:
            self._write(staged, metadata)
            if self._ranks.is_main:
                self._commit(manifest)

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the save in the background is complete. Collective.

        Raises:
            UserError: on every rank, where it failed on any.
        """
        if self._thread is None:
            return
        self._written.wait()
        try:
            self._require_written()
        except Exception:
            self._deadline = 0.0  # rank 0 waits no longer for the others
            raise
        finally:
            self._thread.join()
            self._thread = None
        self._require_committed()

    def close(self) -> None:
        """The run ends here, well or not: let a save that is under way get done, and give the folder back.

        Not collective: after an error, ranks may never meet again.
        """
        if self._thread is not None:
            self._deadline = time.monotonic() + LAST_WAIT_S
            self._thread.join(LAST_WAIT_S)
            self._thread = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # Each rank's part --------------------------------------------------------------------------------------------

    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory, which is used again by the next save."""
        on_gpu = self._ranks.device.type == "cuda"
        staged = {}
        for key, tensor in tensors.items():
            target = self._staged.get(key)
            if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
                target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            staged[key] = target.copy_(tensor, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize(self._ranks.device)
        self._staged = staged
        return staged

    @property
    def _unfinished(self) -> Path:
        return self.folder / f".{folder_name(self._step)}.saving"

    def _write(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        try:
            self._unfinished.mkdir(exist_ok=True)
            info = write_tensors(self._unfinished / file_name(self._ranks.rank), tensors, metadata)
            write_durably(self._unfinished / done_name(self._ranks.rank), msgspec.json.encode(info))
        except Exception as error:  # said to all ranks by `_require_written`
            self._problem = error
        finally:
            self._written.set()

    def _require_written(self) -> None:
        self._on_every_rank(lambda: self._problem)

    def _require_committed(self) -> None:
        self._on_every_rank(lambda: self._commit_problem)

    def _on_every_rank(self, problem: Callable[[], Exception | None]) -> None:
        def check() -> None:
            found = problem()
            if isinstance(found, OSError):
                earlier = "earlier ones are kept" if self.folder.exists() else "the folder has gone"
                reason = found.strerror or found
                raise UserError(f"step {self._step}: cannot save a checkpoint in {self.folder}: {reason}; {earlier}")
            if found is not None:
                raise found

        try:
            on_every_rank(check)
        except Exception:
            if self._ranks.is_main:
                shutil.rmtree(self._unfinished, ignore_errors=True)  # on a full disk, others need the room
            raise

    # The whole ---------------------------------------------------------------------------------------------------

    def _commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of what all ranks have written. On rank 0, which waits for the others here."""
        try:
            infos = {}
            for rank in range(self._ranks.world_size):
                done = self._unfinished / done_name(rank)
                while not done.exists():
                    if time.monotonic() > self._deadline:
                        return
                    time.sleep(POLL_S)
                infos[file_name(rank)] = msgspec.json.decode(done.read_bytes(), type=FileInfo)
                done.unlink()
            write_manifest(self._unfinished, msgspec.structs.replace(manifest, files=infos))
            target = self.folder / folder_name(self._step)
            if target.exists():  # a damaged one, behind which the run went on from an earlier one
                shutil.rmtree(target)
            self._unfinished.rename(target)
            sync_folder(self.folder)
            if self._keep is not None:
                remove_older(self.folder, self._step, self._keep)
        except Exception as error:  # said to all ranks by `_require_committed`
            self._commit_problem = error


def done_name(rank: int) -> str:
    """Of the file in which a rank says that its part is on disk: a `FileInfo`."""
    return f"rank_{rank}.done.json"
