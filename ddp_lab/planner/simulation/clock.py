"""A simulated clock: one rank's compute, and the collectives that are in flight beside it.

The rank computes on one timeline: a thread's (CPU) or that of the compute stream (CUDA). It issues collectives, which
go on while it computes, and it waits for them.

A collective first waits in the queue of its process group, which lets so many run at once, in the order in which they
were issued. Then comes its latency, and then its transfer, which shares its link with other transfers. Of k transfers
that could each fill the link, each advances at a k-th of its own pace. Transfers that fill only a part of the link do
not disturb each other until their parts add up to more than 1 (fluid model: processor sharing). Between two events
(something starts or ends) all paces are constant, so time advances from event to event and nothing is discretized.

Compute is slower by one factor, `contention`, while a collective is in flight, or by a part of it
(`CollectiveCost.slowing`).

On CUDA the host runs ahead. Where it does not, the device waits: an operator begins once the host has issued it. What
the host issues in a side stream may have begun before the compute that was issued earlier was done. Such a collective
is brought up to the present when it is issued, and the compute that it would have slowed down is made up for after it.

Only FSDP2 uses streams of its own, so that collectives go on beside compute. A collective that is waited for within a
side stream blocks that stream alone. Whoever waits for the stream, or for an event in it, waits for the collective.
What is issued in a side stream may begin when everything that this stream has waited for was done, however much compute
the host has issued meanwhile: FSDP2 gathers a block's parameters beside the block before it, for which its streams do
not wait. The host is taken to run ahead as far as that needs. Operators in a side stream (copies into and out of
buffers) take the time of the compute stream, since both need the same memory bandwidth.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_lab.planner.contracts import CollectiveCost
from ddp_lab.pretended.device import Stream


@dataclass(eq=False)
class Flight:
    """A collective from when it is issued until it is done. Moments are in seconds of the clock.

    Attributes:
        cost: What it takes alone.
        ready_s: When all that was issued before it in its stream was done, if that was before `issued_s`.
        meeting: What all ranks that take part in it call it.
        began_s: When it left its queue.
        latency_left_s, transfer_left_s: What is left of `cost`.
    """

    cost: CollectiveCost
    issued_s: float
    queue: "Queue"
    ready_s: float = float("inf")
    meeting: Any = None
    began_s: float | None = None
    ended_s: float | None = None
    latency_left_s: float = field(init=False)
    transfer_left_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.latency_left_s, self.transfer_left_s = self.cost.latency_s, self.cost.transfer_s

    @property
    def is_done(self) -> bool:
        return self.ended_s is not None


class Queue:
    """Collectives of one process group, of which at most `width` run at once.

    Attributes:
        free_s: When the last finished one ended.
    """

    def __init__(self, width: int) -> None:
        self.width, self.running, self.waiting, self.free_s = width, 0, deque[Flight](), 0.0


class Clock:
    """See the module's docstring.

    Args:
        contention: How many times as long compute takes while a collective is in flight; at least 1.
        host_s: What the host takes to issue an operator.

    Attributes:
        now_s: Seconds since the clock was made.
        compute_s: Time spent computing so far, lengthened by contention.
        in_flight_s: Time so far in which a collective was in flight.
        exposed_s: Time so far in which the rank only waited.
        notes: What it was told so far: seconds to compute; a collective when it was issued, and when it was waited for.
    """

    def __init__(self, contention: float = 1.0, host_s: float = 0.0) -> None:
        self._contention, self._host_s, self._issued_s = contention, host_s, 0.0
        self.now_s = self.compute_s = self.in_flight_s = self.exposed_s = 0.0
        self._active: dict[Flight, Queue] = {}  # in the order in which they began
        self._flown_until_s = 0.0
        self.notes: list[float | Flight] = []
        self._owed_s = 0.0  # compute to make up for, since a collective began earlier than it was issued

    @property
    def readings(self) -> tuple[float, float, float, float]:
        """The four attributes that count seconds, in their order."""
        return self.now_s, self.compute_s, self.in_flight_s, self.exposed_s

    def compute(self, seconds: float) -> None:
        """Compute what takes `seconds` where nothing else goes on, as soon as the host has issued it."""
        self.notes.append(seconds)
        self._issued_s += self._host_s
        self._pass_until(self._issued_s)
        self._compute(seconds)

    def read_by_host(self) -> None:
        """The host waits for the device, and issues what follows from now on."""
        self._issued_s = max(self._issued_s, self.now_s)

    def _compute(self, seconds: float) -> None:
        begin, remaining_s = self.now_s, seconds
        if not self._active:
            self.now_s, remaining_s = begin + seconds, 0.0
        while remaining_s > 0:
            slowness = self._slowness([flight.cost for flight in self._active])
            step = self._step(remaining_s * slowness)
            remaining_s = remaining_s - step / slowness if step < remaining_s * slowness else 0.0
        self.compute_s += self.now_s - begin

    def _slowness(self, costs: Iterable[CollectiveCost]) -> float:
        return 1 + (self._contention - 1) * max((cost.slowing for cost in costs), default=0.0)

    def issue(self, cost: CollectiveCost, queue: Queue, ready_s: float = float("inf"), meeting: Any = None) -> Flight:
        """Issue a collective, which begins as soon as its queue lets it. `ready_s`: when it could have begun if no
        compute that was issued before holds it up. `meeting`: as of `Flight`."""
        flight = Flight(cost, self.now_s, queue, ready_s, meeting)
        self.notes.append(flight)
        queue.waiting.append(flight)
        self._begin_next(queue)
        owed_s, self._owed_s = self._owed_s, 0.0
        self._compute(owed_s)
        return flight

    def wait(self, flight: Flight) -> None:
        """Do nothing until `flight` is done."""
        self.notes.append(flight)
        begin = self.now_s
        while not flight.is_done:
            self._step(float("inf"))
        self.exposed_s += self.now_s - begin

    def wait_until(self, moment_s: float) -> None:
        """Do nothing until then."""
        begin = self.now_s
        self._pass_until(moment_s)
        self.exposed_s += self.now_s - begin

    def _pass_until(self, moment_s: float) -> None:
        while (left_s := moment_s - self.now_s) > 0 and self._step(left_s) < left_s:
            pass

    def _begin_next(self, queue: Queue) -> None:
        while queue.waiting and queue.running < queue.width:
            flight = queue.waiting.popleft()
            flight.began_s = min(self.now_s, max(flight.ready_s, queue.free_s))
            queue.running += 1
            self._active[flight] = queue
            ended_s = self._catch_up(flight)
            if not flight.latency_left_s and not flight.transfer_left_s:
                self._end(flight, ended_s)

    def _catch_up(self, flight: Flight) -> float:
        """Bring a collective that began earlier up to the present, at its own pace; answers with how far it came. This
        happens on CUDA, where a queue runs one collective at a time."""
        assert flight.began_s is not None
        latency_s, transfer_s = flight.cost.latency_s, flight.cost.transfer_s
        passed_s = min(self.now_s - flight.began_s, latency_s + transfer_s)
        flight.latency_left_s = max(0.0, latency_s - passed_s)
        is_over = passed_s == latency_s + transfer_s
        flight.transfer_left_s = 0.0 if is_over else min(transfer_s, latency_s + transfer_s - passed_s)
        until_s = flight.began_s + passed_s
        self.in_flight_s += max(0.0, until_s - max(flight.began_s, self._flown_until_s))
        self._flown_until_s = max(self._flown_until_s, until_s)
        self._owed_s += passed_s * (1 - 1 / self._slowness([flight.cost]))
        return until_s

    def _end(self, flight: Flight, ended_s: float) -> None:
        flight.ended_s = ended_s
        queue = self._active.pop(flight)
        queue.running -= 1
        queue.free_s = ended_s
        self._begin_next(queue)

    def _step(self, most_s: float) -> float:
        """Advance to the next event, by at most `most_s`; answers with the seconds."""
        busy: dict[str, float] = defaultdict(float)
        for flight in self._active:
            if not flight.latency_left_s:
                busy[flight.cost.link] += flight.cost.share
        remaining = {
            flight: flight.latency_left_s or flight.transfer_left_s * max(1.0, busy[flight.cost.link])
            for flight in self._active
        }
        step = min([most_s, *remaining.values()])
        self.now_s += step
        if self._active:
            self.in_flight_s += step
            self._flown_until_s = self.now_s
        for flight, left_s in remaining.items():
            progress = 1.0 if left_s <= step else step / left_s
            if flight.latency_left_s:
                flight.latency_left_s *= 1 - progress
            else:
                flight.transfer_left_s *= 1 - progress
            if not flight.latency_left_s and not flight.transfer_left_s:
                self._end(flight, self.now_s)
        return step


Point = tuple[float, Sequence[Flight]]
"""Of a stream: when all is done that was issued in it, or that it has waited for, collectives left out; and these."""


class ComputeStream(Stream):
    """The stream in which operators run: to wait for a collective lets time pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def point(self) -> Point:
        return self._clock.now_s, ()

    def follow(self, point: Point) -> None:
        for flight in point[1]:
            self._clock.wait(flight)


class SideStream(Stream):
    """Keeps what it waits for."""

    def __init__(self) -> None:
        self._point: Point = 0.0, ()

    def point(self) -> Point:
        return self._point

    def follow(self, point: Point) -> None:
        (own_s, flights), (reached_s, more) = self._point, point
        self._point = max(own_s, reached_s), [flight for flight in (*flights, *more) if not flight.is_done]
