"""A clock that no second passes on: one rank's compute, and the collectives that are in flight beside it.

Collectives wait in queues (a process group's; each lets so many of its own run at once, in the order in which they were
issued) and then pass through three stages: a time of idling, in which they take nothing from each other, a latency,
which others of its queue at work draw out where it is work of the same cores, and a transfer, which shares its link. Of
k transfers on one link that each could fill it, each advances at a k-th of its own pace; those that can fill only a
part of it share it without loss until the parts add up to more (fluid model: processor sharing). Compute draws out all
three: what idles waits for other ranks, which compute, too. Between two events (something starts or ends) all paces are
constant, so time advances from event to event and nothing is discretized.

The rank computes on one timeline: a thread's (CPU) or that of the compute stream (CUDA). What it issues starts no
sooner than all compute before it is done; what it waits for blocks it. But on CUDA, where the host runs ahead, what is
issued in a stream of its own may have begun earlier than the compute that was issued before it: then it is brought up
to the present, and compute pays in arrears for what the two take from each other.

A collective begins when the last rank is there. Ranks with equal work drift apart while they compute, with the square
root of the time, until one holds them all up. To hand a collective over takes the rank as long as the thread that
begins it keeps its core: the collective goes on meanwhile, at its own pace.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt

from planner.contracts import CollectiveCost, Contention, ContentionBySize

LATE, IDLE, LATENCY, TRANSFER = "late_left_s", "idle_left_s", "latency_left_s", "transfer_left_s"
UNDER_WAY = (IDLE, LATENCY, TRANSFER)


@dataclass(eq=False)
class Flight:
    """A collective from when it is issued until it is done. Moments in seconds of the clock.

    Attributes:
        cost: What it would take alone.
        beside: What it and compute take from each other.
        ready_s: When all that was issued before it in its stream was done, if that was before `issued_s`.
        others_s: When the last of the other ranks issues it.
        began_s: When its turn came in its queue.
        late_left_s: Until the last of the others is there; until then it takes nothing from compute.
        idle_left_s, latency_left_s, transfer_left_s: Alone on its link.
    """

    cost: CollectiveCost
    beside: Contention
    issued_s: float
    on_done: "Callable[[Flight], None] | None" = None
    ready_s: float = float("inf")
    others_s: float = 0.0
    began_s: float | None = None
    ended_s: float | None = None
    late_left_s: float = 0.0
    idle_left_s: float = field(init=False)
    latency_left_s: float = field(init=False)
    transfer_left_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.idle_left_s = self.cost.idle_s
        self.latency_left_s, self.transfer_left_s = self.cost.latency_s, self.cost.transfer_s

    @property
    def stage(self) -> str:
        """What it is in: the name of the attribute that says how much of that is left; `` at the end."""
        return next((name for name in (LATE, *UNDER_WAY) if getattr(self, name)), "")

    @property
    def is_done(self) -> bool:
        return self.ended_s is not None


class Queue:
    """Collectives of one process group, of which at most `width` are under way at once.

    Attributes:
        free_s: When the last one that is done had ended.
    """

    def __init__(self, width: int) -> None:
        self.width, self.running, self.waiting, self.free_s = width, 0, deque[Flight](), 0.0


class Clock:
    """See the module's docstring.

    Attributes:
        now_s: Seconds since the clock was made.
        compute_s: Time spent computing so far, drawn out by contention.
        in_flight_s: Time so far in which a collective was under way.
        exposed_s: Time so far in which the rank only waited.
    """

    def __init__(self, contention: ContentionBySize | None = None) -> None:
        self._contention = contention or Contention()
        self.now_s = self.compute_s = self.in_flight_s = self.exposed_s = 0.0
        self._active: dict[Flight, Queue] = {}  # in the order in which they began
        self._level_s = 0.0  # compute until all ranks were last at the same point
        self._arrears_s = 0.0  # compute that is to be done later, since a collective began earlier than it seemed
        self._flew_until_s = 0.0

    def compute(self, seconds: float) -> None:
        """Compute what takes `seconds` where nothing else goes on."""
        begin, left = self.now_s, seconds
        while left > 0:
            slowing = (flight.beside.compute for flight in self._active if not flight.late_left_s)
            pace = 1 / max(slowing, default=1.0)
            step = self._step(left / pace, computes=True)
            left = left - step * pace if step < left / pace else 0.0
        self.compute_s += self.now_s - begin

    def issue(
        self,
        cost: CollectiveCost,
        queue: Queue,
        on_done: "Callable[[Flight], None] | None" = None,
        payload_bytes: float = 0.0,
        ready_s: float = float("inf"),
        contends: bool = True,
    ) -> Flight:
        """Hand a collective over, which goes as soon as its queue lets it.

        Args:
            ready_s: From when on it could have gone, if compute that was issued before does not hold it up.
            contends: Whether compute and this one take anything from each other.
        """
        beside = self._contention.beside(payload_bytes) if contends else Contention()
        computed_s = self.compute_s - self._level_s
        others_s = self.now_s + min(beside.drift * sqrt(computed_s), beside.most_late * computed_s)
        flight = Flight(cost, beside, self.now_s, on_done, ready_s, others_s)
        queue.waiting.append(flight)
        self._begin_next(queue)
        arrears_s, self._arrears_s = self._arrears_s, 0.0
        self.compute(arrears_s)
        self._hand_over(flight.beside.hand_over_s)
        return flight

    def _hand_over(self, seconds: float) -> None:
        """The rank is busy, for as long as was measured, others in flight or not, but takes nothing from them."""
        begin, end = self.now_s, self.now_s + seconds
        while self.now_s < end:
            self._step(end - self.now_s, computes=False)
        self.compute_s += self.now_s - begin
        self._level_s += self.now_s - begin  # ranks do not drift apart in it

    def wait(self, flight: Flight) -> None:
        """Do nothing until `flight` is done."""
        begin = self.now_s
        while not flight.is_done:
            self._step(float("inf"), computes=False)
        if self.now_s > begin:
            self._level_s = self.compute_s
        self.exposed_s += self.now_s - begin

    def drain(self) -> None:
        """Do nothing until all collectives are done."""
        while self._active:
            self.wait(next(iter(self._active)))

    def _begin_next(self, queue: Queue) -> None:
        while queue.waiting and queue.running < queue.width:
            flight = queue.waiting.popleft()
            flight.began_s = min(self.now_s, max(flight.ready_s, queue.free_s))
            flight.late_left_s = max(0.0, flight.others_s - self.now_s)
            queue.running += 1
            self._active[flight] = queue
            if flight.began_s < self.now_s:
                self._catch_up(flight)
            if not flight.stage:
                self._end(flight)

    def _catch_up(self, flight: Flight) -> None:
        """Bring up to now what began earlier, beside compute: at its own pace, whatever else was under way. That is on
        CUDA, where a queue has one under way at a time, and none of its own crowds it."""
        assert flight.began_s is not None
        slow = flight.beside.communication
        needed_s = sum(getattr(flight, stage) for stage in UNDER_WAY) * slow
        passed_s = min(self.now_s - flight.began_s, needed_s)
        if passed_s == needed_s:
            flight.ended_s = flight.began_s + needed_s
        done_s = float("inf") if passed_s == needed_s else passed_s / slow
        for stage in UNDER_WAY:
            left_s = getattr(flight, stage)
            setattr(flight, stage, max(0.0, left_s - done_s))
            done_s = max(0.0, done_s - left_s)
        until_s = flight.began_s + passed_s
        self.in_flight_s += max(0.0, until_s - max(flight.began_s, self._flew_until_s))
        self._flew_until_s = max(self._flew_until_s, until_s)
        self._arrears_s += passed_s * (1 - 1 / flight.beside.compute)

    def _end(self, flight: Flight) -> None:
        flight.ended_s = self.now_s if flight.ended_s is None else flight.ended_s
        queue = self._active.pop(flight)
        queue.running -= 1
        queue.free_s = flight.ended_s
        if flight.on_done:
            flight.on_done(flight)
        self._begin_next(queue)

    def _step(self, most_s: float, computes: bool) -> float:
        """Advance to the next event, at most by `most_s`; answers with the seconds. Compute slows collectives."""
        stages = {flight: flight.stage for flight in self._active}
        slowness = self._slowness(stages, computes)
        rest = {flight: getattr(flight, stage) * slowness[flight] for flight, stage in stages.items()}
        step = min([most_s, *rest.values()])
        self.now_s += step
        if self._active:
            self.in_flight_s += step
            self._flew_until_s = self.now_s
        for flight, stage in stages.items():
            left = 0.0 if rest[flight] <= step else getattr(flight, stage) - step / slowness[flight]
            setattr(flight, stage, left)
            if not flight.stage:
                self._end(flight)
        return step

    def _slowness(self, stages: Mapping[Flight, str], computes: bool) -> dict[Flight, float]:
        """How many times as long as alone the present stage of each takes, as long as all are in these stages."""
        busy: dict[str, float] = {}
        for flight, stage in stages.items():
            if stage == TRANSFER:
                busy[flight.cost.link] = busy.get(flight.cost.link, 0.0) + flight.cost.share
        at_work = Counter(self._active[flight] for flight, stage in stages.items() if stage in (LATENCY, TRANSFER))
        slowness = dict.fromkeys(stages, 1.0)
        for flight, stage in stages.items():
            queue = self._active[flight]
            if stage == TRANSFER:
                slowness[flight] = max(1.0, busy[flight.cost.link])
            elif stage == LATENCY and at_work[queue] > 1:
                slowness[flight] = crowding(flight, queue.width)
            if computes and stage != LATE:
                slowness[flight] *= flight.beside.communication
        return slowness


def crowding(flight: Flight, width: int) -> float:
    """The factor on its latency with which each of `width` like it in flight takes as long as measured (`together`); at
    least 1. Each takes its own transfer and a part of a latency: together * (l + t) = t + crowding * l / width."""
    latency, transfer = flight.cost.latency_s, flight.cost.transfer_s
    return max(1.0, width * (flight.beside.together * (latency + transfer) - transfer) / latency)
