"""What other tools get of profile windows on GPUs: Nsight Systems, and pytorch.org/memory_viz."""

from contextlib import suppress
from pathlib import Path

import torch

MOST_ENTRIES = 100_000
"""Allocations and frees that a history keeps, the latest ones. Each takes about 1 KB in a snapshot."""


class NsysWindow:
    """A part of `WindowProfiler`. nsys, started with `--capture-range=cudaProfilerApi`, captures the window, with an
    NVTX range for each `record_function`."""

    def __init__(self) -> None:
        self._ranges: torch.autograd.profiler.emit_nvtx | None = None

    def open(self) -> None:
        pass

    def begin_step(self, step: int, is_first: bool) -> None:
        if is_first:
            torch.cuda.synchronize()  # what earlier steps have launched is not of this window
            torch.cuda.profiler.start()
            self._ranges = torch.autograd.profiler.emit_nvtx().__enter__()
        torch.cuda.nvtx.range_push(f"ProfilerStep#{step}")

    def end_step(self, steps_done: int, is_last: bool) -> None:
        torch.cuda.nvtx.range_pop()
        if is_last:
            torch.cuda.synchronize()
            self.close()

    def close(self) -> None:
        if self._ranges is not None:
            self._ranges.__exit__(None, None, None)
            self._ranges = None
            with suppress(torch.cuda.CudaError):  # an error of the device, which ends the run, comes again in each call
                torch.cuda.profiler.stop()


class MemorySnapshots:
    """A part of `WindowProfiler`: writes a snapshot at the end of each window, and when CUDA's memory runs out.

    The history begins with the first step, since what was allocated before has no stack, and ends with the last window.
    """

    def __init__(self, folder: Path, run_id: str, windows: int) -> None:
        self._folder, self._run_id, self._windows_left = folder, run_id, windows

    def open(self) -> None:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MOST_ENTRIES)
        observer = lambda *_: self._write("out-of-memory")  # noqa: E731
        torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]

    def begin_step(self, step: int, is_first: bool) -> None:
        pass

    def end_step(self, steps_done: int, is_last: bool) -> None:
        if is_last:
            self._windows_left -= 1
            self._write(f"step{steps_done}.memory")
            if not self._windows_left:
                self.close()

    def close(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, name: str) -> None:
        torch.cuda.memory._dump_snapshot(str(self._folder / f"{self._run_id}.{name}.pickle"))
