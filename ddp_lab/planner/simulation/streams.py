"""CUDA streams for code that uses `torch.cpu` streams, since tensors without data are said to lie on the CPU.

Only FSDP2 uses streams of its own, so that collectives go on beside compute. A collective that is waited for within a
side stream blocks that stream alone. Whoever waits for the stream, or for an event in it, waits for the collective.

What is issued in a side stream may begin when everything that this stream has waited for was done, however much compute
the host has issued meanwhile: FSDP2 gathers a block's parameters beside the block before it, for which its streams do
not wait. The host is taken to run ahead as far as that needs. Operators in a side stream (copies into and out of
buffers) take the time of the compute stream, since both need the same memory bandwidth.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from ddp_lab.planner.simulation.clock import Clock, Flight


class Streams:
    """The streams of a pretended device.

    Attributes:
        compute: The stream in which operators run.
        current: The stream that is current now.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.compute = self.current = Stream(self)


class Stream:
    """See `torch.cuda.Stream`. Holds the collectives that what follows in it has to wait for."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._waited_until_s = 0.0
        self.flights: list[Flight] = []

    @property
    def reached_s(self) -> float:
        """When all is done that was issued in it, or that it has waited for, collectives left out."""
        return self._streams.clock.now_s if self is self._streams.compute else self._waited_until_s

    def hold(self, flight: Flight) -> None:
        if self is self._streams.compute:
            self._streams.clock.wait(flight)
        elif not flight.is_done:
            self.flights = [*(one for one in self.flights if not one.is_done), flight]

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        self._waited_until_s = max(self._waited_until_s, event.reached_s)
        for flight in event.flights:
            self.hold(flight)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self._streams)
        event.record(self)
        return event


class Event:
    """See `torch.cuda.Event`."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.reached_s = 0.0
        self.flights: list[Flight] = []

    def record(self, stream: Stream | None = None) -> None:
        of = stream or self._streams.current
        self.reached_s, self.flights = of.reached_s, list(of.flights)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)


@contextmanager
def pretended_streams(streams: Streams) -> Iterator[None]:
    """Within this context `torch.cpu` has these streams, as `torch.cuda` has real ones."""

    @contextmanager
    def switch(stream: Stream) -> Iterator[None]:
        before, streams.current = streams.current, stream
        try:
            yield
        finally:
            streams.current = before

    pretended: dict[str, Any] = {
        "Stream": lambda priority=0: Stream(streams),
        "Event": lambda **_: Event(streams),
        "current_stream": lambda device=None: streams.current,
        "stream": switch,
    }
    with ExitStack() as stack:
        for name, made in pretended.items():
            stack.enter_context(mock.patch.object(torch.cpu, name, made))
        yield
