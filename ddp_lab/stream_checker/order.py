"""Which access to memory comes before which, on streams that are ordered by events alone.

Each stream does its work in the order in which the host issues it. Between streams nothing is ordered, unless one waits
for an event of another. So each stream has a vector clock (Mattern, 1989, "Virtual time and global states of
distributed systems"): how far each stream has come, as far as it knows. Two accesses to the same bytes are a race if
one of them writes, and neither knows of the other.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor, UntypedStorage

from ddp_lab.pretended.device import Storages, Stream, begin, extent


class OrderedStream(Stream):
    """A stream whose points are vector clocks.

    Attributes:
        clock: By stream, the number of its last access that is known here.
    """

    def __init__(self) -> None:
        self.clock: Counter[Stream] = Counter()

    def point(self) -> Counter[Stream]:
        return self.clock.copy()

    def follow(self, point: Counter[Stream]) -> None:
        self.clock |= point

    def knows(self, access: "Access") -> bool:
        """Whether what is issued in it now comes after `access`."""
        return self.clock[access.stream] >= access.number


class Access(NamedTuple):
    """Bytes `start` to `end` of a storage, by access `number` of `stream`."""

    stream: OrderedStream
    number: int
    start: int
    end: int
    writes: bool
    origin: str

    def __str__(self) -> str:
        return f"what {self.origin} still {'writes' if self.writes else 'reads'}"


@dataclass
class AllocatedBlock:
    """A storage that is alive. `owner`: the stream that it was allocated in."""

    owner: OrderedStream
    accesses: list[Access] = field(default_factory=list)


class CheckedMemory:
    """The accesses to all storages that still count.

    Attributes:
        races: How often each race was found, by a text that says which accesses it is between.
    """

    def __init__(self) -> None:
        self.races: Counter[str] = Counter()
        self._blocks = Storages[AllocatedBlock](partial(self._free, origin="the end of its last tensor"))
        self._freed: dict[Stream, list[tuple[str, Access]]] = defaultdict(list)  # by owner

    def access(self, stream: OrderedStream, reads: Iterable[Tensor], writes: Iterable[Tensor], origin: str) -> None:
        """Work in `stream` that reads and writes these tensors."""
        stream.clock[stream] += 1
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel() and tensor.untyped_storage().nbytes():
                    first = begin(tensor)
                    new = Access(stream, stream.clock[stream], first, first + extent(tensor), writing, origin)
                    self._record(tensor, new)

    def _record(self, tensor: Tensor, new: Access) -> None:
        block = self._blocks.of(tensor) or self._blocks.add(tensor.untyped_storage(), AllocatedBlock(new.stream))
        live = []
        for old in block.accesses:
            is_known, either_writes = new.stream.knows(old), new.writes or old.writes
            if not is_known and either_writes and old.start < new.end and new.start < old.end:
                self.races[f"{new.origin} {'writes' if new.writes else 'reads'} {old}"] += 1
            # whoever comes after the new access also comes after an old one that it follows and covers
            is_covered = new.start <= old.start and old.end <= new.end and (new.writes or not old.writes)
            if not (is_known and is_covered):
                live.append(old)
        block.accesses = [*live, new]

    def free(self, storage: UntypedStorage, origin: str) -> None:
        """Its memory goes back to the allocator now, to the pool of the stream that it was allocated in."""
        if block := self._blocks.get(storage._cdata):
            self._free(block, origin)
            block.accesses = []

    def _free(self, block: AllocatedBlock, origin: str) -> None:
        self._freed[block.owner] += [(origin, access) for access in block.accesses]

    def allocated(self, stream: OrderedStream) -> None:
        """A tensor gets memory in `stream`: perhaps what was freed in it, at once, as torch's caching allocator does.

        So the stream must come after all that other streams did there.
        """
        for origin, old in self._freed.pop(stream, ()):
            if not stream.knows(old):
                self.races[f"{origin} lets a new tensor have {old}"] += 1
