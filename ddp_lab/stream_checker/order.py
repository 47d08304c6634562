"""Which access to memory comes before which, on streams that are ordered by events alone.

Each stream does its work in the order in which the host issues it. Between streams nothing is ordered, unless one waits
for an event of another. So each stream has a vector clock (Mattern, 1989, "Virtual time and global states of
distributed systems"): how far each stream has come, as far as it knows. Two accesses to the same bytes are a race if
one of them writes, and neither knows of the other.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

Clock = Counter[str]
"""By stream, the number of its last access that is known."""


class Stream:
    """A queue of work on the device. `torch.cpu.Stream` is replaced by it, so that FSDP2's side streams are seen."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, Clock()

    def tick(self) -> int:
        """The number of the next access."""
        self.clock[self.name] += 1
        return self.clock[self.name]

    def learn(self, clock: Clock) -> None:
        """What follows in this stream comes after all that `clock` knows."""
        self.clock |= clock

    def wait_stream(self, other: "Stream") -> None:
        self.learn(other.clock)

    def wait_event(self, event: "Event") -> None:
        self.learn(event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.clock = self.clock.copy()
        return event


class Event:
    """A point in a stream. Before it is recorded there is nothing to wait for."""

    def __init__(self) -> None:
        self.clock = Clock()


@dataclass(frozen=True)
class Access:
    """Bytes `start` to `end` of a storage, by access `number` of `stream`."""

    stream: str
    number: int
    start: int
    end: int
    writes: bool
    what: str

    def conflicts(self, other: "Access", clock: Clock) -> bool:
        """Whether this earlier access and `other` race, if all that `other` knows is `clock`."""
        overlap = self.start < other.end and other.start < self.end
        return overlap and (self.writes or other.writes) and clock[self.stream] < self.number


class Memory:
    """The accesses to all storages that still count.

    Attributes:
        races: How often each race was found, by a text that says which accesses it is between.
    """

    def __init__(self) -> None:
        self.races: Counter[str] = Counter()
        self._accesses: dict[int, list[Access]] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self._owner: dict[int, Stream] = {}
        self._freed: dict[str, list[tuple[str, Access]]] = {}  # by stream: what it does not know of freed memory

    def access(
        self, stream: Stream, reads: Iterable[Tensor], writes: Iterable[Tensor], what: Callable[[], str]
    ) -> None:
        """Work in `stream` that reads and writes these tensors."""
        number = stream.tick()
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel() and tensor.untyped_storage().nbytes():
                    self._note(tensor, stream, number, writing, what)

    def _note(self, tensor: Tensor, stream: Stream, number: int, writes: bool, what: Callable[[], str]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key], self._owner[key] = StorageWeakRef(storage), stream
        start, end = span(tensor)
        new = Access(stream.name, number, start, end, writes, "")
        known = self._accesses.setdefault(key, [])
        for old in known:
            if old.stream != stream.name and old.conflicts(new, stream.clock):
                self._race(f"{what()} {'writes' if writes else 'reads'} what {old.what} {verb(old)}")
        if writes:  # what lies behind this write, and below it, is ordered by it
            covered = [o for o in known if start <= o.start and o.end <= end and stream.clock[o.stream] >= o.number]
            known[:] = [old for old in known if old not in covered]
        elif any((o.stream, o.start, o.end, o.writes) == (stream.name, start, end, False) for o in known):
            known[:] = [o for o in known if (o.stream, o.start, o.end, o.writes) != (stream.name, start, end, False)]
        known.append(Access(stream.name, number, start, end, writes, what()))

    def free(self, storage: UntypedStorage, what: str) -> None:
        """Its memory goes back to the allocator now, to the pool of the stream that it was allocated in."""
        self._forget(storage._cdata, what)

    def allocated(self, stream: Stream) -> None:
        """A tensor gets memory in `stream`: perhaps what was freed in it, at once, as torch's caching allocator does.

        So the stream must know by now of what other streams did there.
        """
        for what, old in self._freed.pop(stream.name, ()):
            if stream.clock[old.stream] < old.number:
                self.races[f"{what} lets a new tensor have what {old.what} {verb(old)}"] += 1

    def look_for_freed(self) -> None:
        """Find storages that Python has let go."""
        for key in [key for key, reference in self._alive.items() if reference.expired()]:
            self._forget(key, "the end of its last tensor")

    def _forget(self, key: int, what: str) -> None:
        owner = self._owner.pop(key, None)
        accesses = self._accesses.pop(key, ())
        self._alive.pop(key, None)
        if owner is not None:
            unknown = [(what, old) for old in accesses if owner.clock[old.stream] < old.number]
            self._freed.setdefault(owner.name, []).extend(unknown)

    def _race(self, text: str) -> None:
        self.races[text] += 1


def verb(access: Access) -> str:
    return "still writes" if access.writes else "still reads"


def span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage in which the elements of a tensor lie, gaps between them included."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first * tensor.element_size()), int((last + 1) * tensor.element_size())
