"""Names the rank that is behind where a loop of the caller's own stands still, long before the group's timeout.

It mostly is a rank that runs fewer micro-batches or steps than others. Ranks tell their places only after a while in
which they have not moved, so a step costs nothing.
"""

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PATIENCE_S = 30.0

_places: WeakSet["Place"] = WeakSet()
_numbers = count()
_looking = threading.Lock()
"""Held while places are looked at: a thread may still be there when another begins, and each line is said once."""


class Place:
    """Where this rank is.

    Attributes:
        at: Optimizer steps done, and micro-batches of the next one that have begun.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.at = self._seen = (0, 0)
        self._group, self._since, self._is_said = group, time.monotonic(), False
        self._prefix = f"ddp-lab/places/{next(_numbers)}"
        self._store: dist.Store | None = None  # while this rank does not move, its place is there
        _places.add(self)
        if len(_places) == 1:
            threading.Thread(target=_look, name="places", daemon=True).start()

    def move(self, steps: int) -> None:
        """The next micro-batch begins, after so many optimizer steps."""
        self.at = steps, 1 + (self.at[1] if self.at[0] == steps else 0)

    def look(self) -> None:
        """Called now and then. Rank 0 says once who is behind."""
        rank, now = self._group.rank(), time.monotonic()
        if self.at != self._seen:
            if self._store is not None:
                self._store.delete_key(str(rank))
            self._seen, self._since, self._is_said, self._store = self.at, now, False, None
        elif now - self._since > PATIENCE_S and not self._is_said:
            if self._store is None:
                self._store = dist.PrefixStore(self._prefix, _get_default_store().clone())
                self._store.set(str(rank), "{} {}".format(*self.at))
            keys = [str(other) for other in range(self._group.size())]
            if rank == 0 and self._store.check(keys):
                line = behind([tuple(map(int, self._store.get(key).split())) for key in keys])
                self._is_said = bool(line)
                if line:
                    print(f"warning: for {now - self._since:.0f} s, {line}", file=sys.stderr, flush=True)


def behind(places: Sequence[tuple[int, ...]]) -> str:
    """What to say of ranks whose `Place.at` is this; empty if they are all in the same place."""
    last, first = min(places), max(places)
    if last == first:
        return ""
    who, other = places.index(last), places.index(first)
    return (
        f"rank {who} is behind: it has done {last[0]} steps and begun {last[1]} micro-batches of the next, and rank "
        f"{other} {first[0]} and {first[1]}; each rank must run as many steps, and micro-batches in them, as the others"
    )


def _look() -> None:
    while _places:
        time.sleep(PATIENCE_S / 6)
        for place in [*_places]:
            with _looking, suppress(RuntimeError, ValueError):  # the group or its store has gone
                place.look()
