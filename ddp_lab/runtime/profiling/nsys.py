"""A profile window for Nsight Systems: what it captures, and a range for each step (`ddp_lab.runtime.watch.ranges`)."""

from contextlib import suppress

import torch

from ddp_lab.runtime.watch import ranges


class NsysWindow:
    """A part of `WindowProfiler`. nsys must have been started with `--capture-range=cudaProfilerApi`."""

    def __init__(self) -> None:
        self._captures = False

    def open(self) -> None:
        ranges.show_ranges(torch.cuda.nvtx)

    def begin_step(self, step: int, is_first: bool) -> None:
        if is_first:
            torch.cuda.synchronize()  # what earlier steps have launched is not of this window
            torch.cuda.profiler.start()
            self._captures = True
        ranges.push(f"ProfilerStep#{step}")

    def end_step(self, steps_done: int, is_last: bool) -> None:
        ranges.pop()
        if is_last:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            self._captures = False

    def close(self) -> None:
        if self._captures:  # the run ends within a window; a collective may never end, so nothing is waited for
            ranges.pop()
            with suppress(torch.cuda.CudaError):  # an error of the device, which ends the run, comes again in each call
                torch.cuda.profiler.stop()
        ranges.show_ranges(None)
