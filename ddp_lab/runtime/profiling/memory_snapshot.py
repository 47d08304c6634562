"""Snapshots of CUDA memory for pytorch.org/memory_viz: what is allocated, and who allocated and freed what.

The history begins with the first step, because what was allocated before has no stack. It ends with the last profile
window. Until then each allocation costs some microseconds, so steps are not timed.
"""

import sys
from pathlib import Path

import torch

SNAPSHOT_NAME = "{run_id}.step{step}.memory.pickle"
AT_OUT_OF_MEMORY = "{run_id}.out-of-memory.pickle"
MOST_ENTRIES = 100_000
"""Allocations and frees that the history keeps, the latest ones. Each takes about 1 KB in a snapshot."""


class MemorySnapshots:
    """A part of `WindowProfiler`: writes a snapshot at the end of each window, and when CUDA's memory runs out."""

    def __init__(self, folder: Path, run_id: str, windows: int) -> None:
        self._folder, self._run_id, self._windows_left = folder, run_id, windows

    def open(self) -> None:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MOST_ENTRIES)
        torch._C._cuda_attach_out_of_memory_observer(self._at_out_of_memory)  # type: ignore[attr-defined]

    def begin_step(self, step: int, is_first: bool) -> None:
        pass

    def end_step(self, steps_done: int, is_last: bool) -> None:
        if not is_last:
            return
        self._windows_left -= 1
        write_snapshot(self._folder / SNAPSHOT_NAME.format(run_id=self._run_id, step=steps_done))
        if not self._windows_left:
            self.close()

    def close(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def _at_out_of_memory(self, device: int, wanted: int, allocated: int, free: int) -> None:
        """Torch calls this before it raises. Several calls for one failure write the same file."""
        path = self._folder / AT_OUT_OF_MEMORY.format(run_id=self._run_id)
        try:
            write_snapshot(path)
        except OSError as error:
            print(f"warning: cannot write {path}: {error.strerror}", file=sys.stderr, flush=True)


def write_snapshot(path: Path) -> None:
    """Write what CUDA's memory holds, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    hidden = path.with_name(f".{path.name}.tmp")
    try:
        torch.cuda.memory._dump_snapshot(str(hidden))
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
