"""Ranks that do not do the same, such as those of a pipeline, and wait for each other.

Each has been simulated by itself, as if nobody kept it waiting. What its clock was told meanwhile is told to a new one
here, beside those of the others. A collective, or a message, that several of them take part in is done a while after
the last of them has come to it, and those of one group follow one another.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ddp_lab.planner.contracts import Costs
from ddp_lab.planner.simulation.clock import Clock, Flight, Queue

Notes = Sequence[float | Flight]
"""Of one rank (`Clock.notes`)."""
Readings = tuple[float, float, float, float]
"""Of one clock (`Clock.readings`)."""


def side_by_side(notes: Sequence[Notes], begins: Sequence[int], costs: Costs) -> list[tuple[Readings, Readings]]:
    """Of each rank, what its clock shows when the step that counts begins, and when all is done. `notes`: what was
    noted of each rank. `begins`: how many of its notes are from before that step. `costs`: what slows compute."""
    meetings, clocks = Meetings(notes), [Clock(costs.contention, costs.host_s) for _ in notes]
    readings: list[list[Readings]] = [[] for _ in notes]
    walks = [walk(*rank_walk, meetings) for rank_walk in zip(clocks, notes, begins, readings, strict=True)]
    while walks:
        before = meetings.missing.total()
        walks = [rank_walk for rank_walk in walks if next(rank_walk, None) is not None]
        assert not walks or meetings.missing.total() < before, "a schedule never waits for itself"
    return [(begin, clock.readings) for clock, (begin,) in zip(clocks, readings, strict=True)]


class Meetings:
    """What several ranks take part in, by name (`Flight.meeting`).

    Attributes:
        missing: How many of them have not come yet.
        done_s: When it is done, once all have. What one rank alone takes part in does not wait for others.
    """

    def __init__(self, by_rank: Sequence[Notes]) -> None:
        self.missing = Counter(flight.meeting for notes in by_rank for flight in {*notes} if isinstance(flight, Flight))
        self.done_s = {meeting: 0.0 for meeting, ranks in self.missing.items() if ranks == 1}
        self._latest_s: dict[Any, float] = defaultdict(float)
        self._free_s: dict[str, float] = defaultdict(float)  # when all is done that was sent in a group so far

    def come(self, flight: Flight, now_s: float) -> None:
        """A rank takes part from now on."""
        meeting, cost = flight.meeting, flight.cost
        self._latest_s[meeting] = max(self._latest_s[meeting], now_s)
        self.missing[meeting] -= 1
        if not self.missing[meeting] and meeting not in self.done_s:
            group, _ = meeting
            ready_s = max(self._latest_s[meeting] + cost.latency_s, self._free_s[group])
            self.done_s[meeting] = self._free_s[group] = ready_s + cost.transfer_s


def walk(clock: Clock, notes: Notes, begin: int, readings: list[Readings], meetings: Meetings) -> Iterator[bool]:
    """Tell the clock what was noted. Stops where the rank waits for another that has not come so far."""
    flights: dict[Flight, Flight] = {}
    queues: dict[Queue, Queue] = {}
    for place, note in enumerate(notes):
        if place == begin:
            readings.append(clock.readings)
        if not isinstance(note, Flight):
            clock.compute(note)
        elif note not in flights:
            flights[note] = clock.issue(note.cost, queues.setdefault(note.queue, Queue(note.queue.width)))
            meetings.come(note, clock.now_s)
        else:
            while note.meeting not in meetings.done_s:
                yield True
            clock.wait(flights[note])
            clock.wait_until(meetings.done_s[note.meeting])
