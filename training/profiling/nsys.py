"""A profile window for Nsight Systems: what it captures, and a range for each step (`training.watch.ranges`)."""

import torch

from training.watch import ranges


class NsysWindow:
    """A part of `WindowProfiler`. nsys must have been started with `--capture-range=cudaProfilerApi`."""

    def open(self) -> None:
        ranges.show_ranges(torch.cuda.nvtx)

    def begin_step(self, step: int, is_first: bool) -> None:
        if is_first:
            torch.cuda.synchronize()  # what earlier steps have launched is not of this window
            torch.cuda.profiler.start()
        ranges.push(f"ProfilerStep#{step}")

    def end_step(self, steps_done: int, is_last: bool) -> None:
        ranges.pop()
        if is_last:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()

    def close(self) -> None:
        ranges.show_ranges(None)
