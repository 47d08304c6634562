"""How often the host waits for the device in the middle of a run."""

import warnings
from pathlib import Path
from typing import Any

import torch

from ddp_lab.runtime.loop import StepFollower

SETTLED, COUNTED = 7, 4
SAYS = "called a synchronizing CUDA operation"
"""The warning of `torch.cuda.set_sync_debug_mode`. When the mode is set first, another one speaks of it."""


class HostWaits(StepFollower):
    """Follows `train`, and counts in `COUNTED` steps after the first `SETTLED`. The end of a run may wait.

    Attributes:
        steps: How many steps the run must have: the last is not counted.
        waits: How many there were in all counted steps, by file and line.
    """

    steps = SETTLED + COUNTED + 1

    def __init__(self, device: torch.device) -> None:
        self.waits: dict[str, int] = {}
        self._is_cuda, self._steps, self._is_counting = device.type == "cuda", 0, False
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> "HostWaits":
        self._warnings.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self._count(False)
        self._warnings.__exit__(None, None, None)

    def step(self) -> None:
        self._steps += 1
        self._count(SETTLED <= self._steps < SETTLED + COUNTED)

    def _count(self, is_counting: bool) -> None:
        if self._is_cuda and is_counting != self._is_counting:
            torch.cuda.set_sync_debug_mode("warn" if is_counting else "default")
        self._is_counting = is_counting

    def _note(self, message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if self._is_counting and SAYS in str(message):
            place = f"{Path(filename).name}:{line}"
            self.waits[place] = self.waits.get(place, 0) + 1
