"""One order of collectives on all ranks, whatever the order in which gradients become ready.

A collective is matched with the one that the other ranks issue at the same place in their sequence. Ranks may use
different parameters, and then their hooks fire in different orders. So the sequence is fixed before training. An item
that is ready early waits for those before it; what backward does not make on this rank still takes its turn.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FixedOrder(Generic[Item]):
    """Releases `items` (parameters or buckets) one after the other, in the order in which they are given."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = list(items)
        self._place = {item: index for index, item in enumerate(self._items)}
        self.restart()

    def restart(self) -> None:
        """Begin a new step: nothing is ready, nothing is released."""
        self._ready = [False] * len(self._items)
        self._released = 0

    def ready(self, item: Item) -> Iterator[Item]:
        """Mark `item` as ready, and release every item whose turn has come."""
        self._ready[self._place[item]] = True
        while self._released < len(self._items) and self._ready[self._released]:
            yield self._release()

    def release_all(self) -> Iterator[Item]:
        """Release the remaining items, ready or not."""
        while self._released < len(self._items):
            yield self._release()

    def _release(self) -> Item:
        self._released += 1
        return self._items[self._released - 1]
