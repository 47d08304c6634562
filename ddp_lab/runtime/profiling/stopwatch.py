"""Measures time on a device."""

import time
from collections.abc import Sequence
from typing import Any

import torch


class Stopwatch:
    """Marks moments, without making the host wait for the device.

    Args:
        device: On CUDA a mark is an event in the current stream. Elsewhere it is the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"

    def mark(self) -> Any:
        """This moment."""
        if not self._on_cuda:
            return time.perf_counter()
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
