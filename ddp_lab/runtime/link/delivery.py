"""Threads that deliver what a process group sends, in the order of issue, when links would have."""

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import BoundedSemaphore, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.link.ledger import SLOTS, Ledger, Schedule

PR_SET_TIMERSLACK = 29
ENDING_S = 1.0
"""How long the end of a group waits for its last deliveries."""
Result = TypeVar("Result")
NAMESPACE = "paced"
OPERATORS = ("all_reduce", "all_gather", "broadcast", "scatter", "gather", "all_to_all", "barrier", "send", "recv")
"""Operators that do what Python tells them to, so that a profile shows them, with the shape of a tensor, on any thread.
`record_function` shows no shapes, and on threads that torch has not started it needs a profile of all threads
(`profile_all_threads`), as these do."""
_doing = threading.local()
_library = torch.library.Library(NAMESPACE, "DEF")
for _name in OPERATORS:
    _library.define(f"{_name}(Tensor? shown) -> ()")
    _library.impl(_name, lambda *_: _doing.now(), "CompositeExplicitAutograd")


def as_operator(name: str, shown: Tensor | None, do: Callable[[], Result]) -> Result:
    """What `do` returns, called within the operator `paced::<name>` of a tensor."""
    results: list[Result] = []
    _doing.now = lambda: results.append(do())
    try:
        getattr(getattr(torch.ops, NAMESPACE), name)(shown)
    finally:
        del _doing.now  # it holds tensors
    return results[0]


@dataclass(frozen=True)
class Failure:
    """The value of a future that has none. C++ would take what `Future.set_exception` sets for a value."""

    error: Exception


class PacedWork(dist._Work):
    """What the caller of a collective waits for."""

    def __init__(self, delivered: Any) -> None:
        super().__init__()
        self._delivered = delivered

    def wait(self, timeout: Any = None) -> bool:
        values_of(self._delivered.wait())
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._delivered.done()

    def is_success(self) -> bool:
        return self.is_completed() and not isinstance(self._delivered.value(), Failure)

    def get_future(self) -> Any:
        return self._delivered.then(lambda delivered: values_of(delivered.value()))


def values_of(delivered: Any) -> Any:
    if isinstance(delivered, Failure):
        raise delivered.error
    return delivered


class Delivery:
    """A thread, and the parcels that wait for it: all collectives of a group, or all messages from one rank to another.

    `name` is the same on all ranks of the group; `rank` is this one's place in `members`, ranks of the world.
    """

    def __init__(self, name: str, ledger: Ledger, members: Sequence[int], rank: int) -> None:
        self._ledger, self._members, self._rank = ledger, tuple(members), rank
        self._number, self._count = ledger.group(name), 0
        self._room = BoundedSemaphore(SLOTS)
        self._parcels: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"links of group {name}", daemon=True)
        self._thread.start()

    def send(self, kind: str, shown: Tensor | None, messages: Schedule, issue: Callable[[], Any]) -> PacedWork:
        """Issue, and deliver when it is due. Waits while too many are on their way.

        `kind`: one of `OPERATORS`, which a trace shows until it is delivered, with the shape of tensor `shown`. `issue`
        lets Gloo move it, and returns Gloo's future, or its work where it has no future.
        """
        self._room.acquire()
        self._count += 1
        place = (self._number, self._count, self._rank)
        self._ledger.issue(*place)
        moved, delivered = issue(), torch.futures.Future[Any]()

        def wait() -> Any:
            result = moved.wait()
            time.sleep(max(0.0, self._ledger.delivery(*place, self._members, messages) - time.monotonic()))
            return result

        def deliver() -> None:
            try:
                result = as_operator(kind, shown, wait)
            except Exception as error:  # the caller's, whatever it is
                result = Failure(error)
            delivered.set_result(result)

        self._parcels.put(deliver)
        return PacedWork(delivered)

    def end(self) -> None:
        """Deliver what Gloo has moved. No parcel follows.

        Python must not end while a thread is inside of an operator. One that waits for a rank that is gone is left.
        """
        self._parcels.put(None)
        self._thread.join(ENDING_S)

    def _run(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # of this thread: else it sleeps 50 us too long
        while (deliver := self._parcels.get()) is not None:
            deliver()
            self._room.release()
            del deliver  # it holds tensors
