"""SIGUSR1: save a checkpoint after a step, and end. SLURM sends it ahead of the time limit (`docs/slurm.md`)."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LINE = "rank {rank}: SIGUSR1 is ignored: without --checkpoint-every there would be nothing to resume from\n"


class StopRequest:
    """Whether this rank has been asked to stop. The ranks agree on a step elsewhere (`Strategy.wants_to_stop`)."""

    def __init__(self) -> None:
        self._has_arrived = self._is_refused = False

    def __call__(self) -> bool:
        return self._has_arrived

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        self._has_arrived = True

    def refuse(self, number: int, frame: FrameType | None) -> None:
        """The handler in a run without checkpoints. It goes on."""
        if not self._is_refused:
            line = LINE.format(rank=os.environ.get("RANK"))
            os.write(2, line.encode())  # the signal may interrupt a `print`, within which there can be no other
        self._is_refused = True


@contextmanager
def stop_requests(saves: bool) -> Iterator[StopRequest]:
    """Within this context SIGUSR1 does not end the process.

    Args:
        saves: Whether the run has checkpoints. If not, each rank answers the signal with one line.
    """
    request = StopRequest()
    before = signal.signal(signal.SIGUSR1, request.note if saves else request.refuse)
    try:
        yield request
    finally:
        signal.signal(signal.SIGUSR1, before)
