"""The thread that delivers the collectives of one process group, in the order of issue, when links would have."""

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from training.link.spans import as_operator

PR_SET_TIMERSLACK = 29
ENDING_S = 1.0
"""How long the end of a group waits for its last deliveries."""


@dataclass(frozen=True)
class Parcel:
    """A collective that Gloo is moving.

    Attributes:
        kind: The operator of `spans` that a trace shows until it is delivered.
        shown: The tensor whose shape its span shows, if any.
        moved: Gloo's future.
        due: When the links will have delivered it, as `time.monotonic`; asked once Gloo has moved the data.
        values: Makes the value of the future that the caller gets from that of Gloo's.
    """

    kind: str
    shown: Tensor | None
    moved: Any
    due: Callable[[], float]
    values: Callable[[Any], Any]

    def deliver(self, delivered: Any) -> None:
        """Give the future `delivered` its value when it is due."""
        try:
            values = as_operator(self.kind, (self.shown,), self._wait)
        except Exception as error:  # the caller's, whatever it is
            delivered.set_exception(error)
        else:
            delivered.set_result(values)

    def _wait(self) -> Any:
        values = self.values(self.moved.wait())
        time.sleep(max(0.0, self.due() - time.monotonic()))
        return values


class Delivery:
    def __init__(self, name: str) -> None:
        self._parcels: SimpleQueue[tuple[Parcel, Any] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"links of group {name}", daemon=True)
        self._thread.start()

    def send(self, parcel: Parcel) -> Any:
        """The future of `parcel`'s values."""
        delivered: Any = torch.futures.Future()
        self._parcels.put((parcel, delivered))
        return delivered

    def end(self) -> None:
        """Deliver what Gloo has moved. No parcel follows.

        Python must not end while a thread is inside of an operator. One that waits for a rank that is gone is left.
        """
        self._parcels.put(None)
        self._thread.join(ENDING_S)

    def _run(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # of this thread: else it sleeps 50 us too long
        while (one := self._parcels.get()) is not None:
            parcel, delivered = one
            parcel.deliver(delivered)
            del one, parcel, delivered  # they hold tensors
