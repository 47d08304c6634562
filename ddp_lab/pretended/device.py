"""A device that is only pretended: `torch.cpu` has streams and events that are ordered as those of `torch.cuda` are.

What it means that one stream waits for another is up to an observer, who makes the streams. The planner's clock lets
time pass (`ddp_lab.planner.simulation.clock`), and the stream checker notes which access to memory comes before which
(`ddp_lab.stream_checker.order`).
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from unittest import mock

import torch
from torch import Tensor, UntypedStorage

from ddp_lab.strategy.exchange import Exchange

Record = TypeVar("Record")


class Stream(ABC):
    """As `torch.cuda.Stream`: a queue of work."""

    @abstractmethod
    def point(self) -> Any:
        """The end of all work that was issued in it so far, in terms of its observer."""

    @abstractmethod
    def follow(self, point: Any) -> None:
        """All work that is issued in it from now on comes after `point`, which may be of another stream."""

    def wait_stream(self, other: "Stream") -> None:
        self.follow(other.point())

    def wait_event(self, event: "Event") -> None:
        if event.point is not None:
            self.follow(event.point)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


class Event:
    """As `torch.cuda.Event`: a point in a stream. Before it is recorded there is nothing to wait for."""

    point: Any = None

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        self.point = (stream or current_stream()).point()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits. Operators ran when they were issued, so there is nothing to wait for."""


def current_stream() -> Stream:
    """Within `pretended_streams`."""
    stream: Any = torch.cpu.current_stream()
    return stream


class Streams:
    """The streams of a pretended device.

    Args:
        compute: The stream in which operators run unless the program says otherwise.
        make: Makes another stream.

    Attributes:
        current: The stream in which operators run now.
    """

    def __init__(self, compute: Stream, make: Callable[[], Stream]) -> None:
        self.current: Any = compute
        self.make = make

    @contextmanager
    def switch(self, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextmanager
def pretended_streams(streams: Streams) -> Iterator[None]:
    """Within this context `torch.cpu` has these streams, as `torch.cuda` has real ones, and a host that reads loss and
    norm would wait."""
    pretended: dict[str, Any] = {
        "Stream": lambda **_: streams.make(),
        "Event": Event,
        "current_stream": lambda device=None: streams.current,
        "stream": streams.switch,
    }
    with (
        mock.patch.multiple(torch.cpu, **pretended),
        mock.patch.object(Exchange, "shares_stay_on_device", True),
    ):
        yield


# Memory ---------------------------------------------------------------------------------------------------------------


class Storages(dict[int, Record], Generic[Record]):
    """A record of each storage until it is freed, by `UntypedStorage._cdata`.

    Args:
        on_freed: Called with the record of a storage when it is freed.
    """

    def __init__(self, on_freed: Callable[[Record], object]) -> None:
        super().__init__()
        self._on_freed = on_freed
        self._refs: dict[int, Any] = {}

    def of(self, tensor: Tensor) -> Record | None:
        """The record of the storage of `tensor`; None if there is none."""
        return self.get(tensor.untyped_storage()._cdata)

    def add(self, storage: UntypedStorage, record: Record) -> Record:
        key = storage._cdata

        def forget(_: object) -> None:
            del self._refs[key]
            self._on_freed(self.pop(key))

        self[key], self._refs[key] = record, weakref.ref(storage, forget)
        return record


@contextmanager
def resizes_seen(on_resize: Callable[[UntypedStorage, int], object]) -> Iterator[None]:
    """Within this context `on_resize` is called with each storage that is resized, and the bytes that it had."""
    plain_resize = UntypedStorage.resize_

    def resize(storage: UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        answer = plain_resize(storage, size)
        on_resize(storage, before)
        return answer

    with mock.patch.object(UntypedStorage, "resize_", resize):
        yield


def begin(tensor: Tensor) -> int:
    """Where a tensor begins, in bytes of its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


def extent(tensor: Tensor) -> int:
    """Bytes from the first to the last element of a tensor."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
