"""Measures time on a device, for strategies that measure. They use no other clock."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Clock = Callable[[], float]


class Stopwatch:
    """Marks moments, without making the host wait for the device.

    Args:
        device: On CUDA a mark is an event in the current stream. Elsewhere it is what `clock` returns.
        clock: Returns seconds. A simulated cluster passes its own.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._on_cuda = device.type == "cuda"
        self._clock = clock

    def mark(self) -> Any:
        """This moment."""
        if not self._on_cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_since_first(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from the first of `marks` to each of them. On CUDA, waits until the device has reached all."""
        if not self._on_cuda:
            return [mark - marks[0] for mark in marks]
        for mark in marks:
            mark.synchronize()
        return [marks[0].elapsed_time(mark) / 1000 for mark in marks]
