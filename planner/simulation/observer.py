"""Watches the training loop, and keeps what happens in the simulated step that counts."""

from planner.contracts import OperatorCall, Span
from planner.simulation.clock import Clock
from planner.simulation.network import Issued


class StepObserver:
    """Follows the training loop as a profiler does, and records operators and collectives.

    Attributes:
        issued: Collectives that the step has issued.
    """

    slows_this_step = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._compute: list[tuple[OperatorCall, str, float, float]] = []
        self._earlier: list[Issued] = []
        self.issued: list[Issued] = []

    def start(self) -> None:
        """The step that counts begins. Collectives that are not done yet reach into it."""
        self._earlier = [issued for issued in self.issued if not issued.flight.is_done]
        self.issued, self._compute = [], []

    def on_compute(self, call: OperatorCall, phase: str, start_s: float) -> None:
        """An operator is done."""
        self._compute.append((call, phase, start_s, self._clock.now_s))

    def step(self) -> None:
        """The training loop's: nothing to do."""

    def spans(self, begin_s: float, end_s: float) -> list[Span]:
        """What lies between two moments; of a collective that reaches beyond them, the part that does."""
        spans = [
            Span("compute", call.name, start - begin_s, end - begin_s, {"call": call, "phase": phase})
            for call, phase, start, end in self._compute
        ]
        free: list[float] = []  # for each lane of communication, when it is free again
        for issued in sorted([*self._earlier, *self.issued], key=lambda each: each.flight.began_s or 0.0):
            flight = issued.flight
            start, end = max(flight.began_s or 0.0, begin_s), min(flight.ended_s or end_s, end_s)
            if flight.began_s is None or end <= start:
                continue
            lane = next((index for index, until in enumerate(free) if until <= start), len(free))
            free[lane : lane + 1] = [end]
            details = {"payload_bytes": issued.payload_bytes, "backend": issued.backend}
            spans.append(Span(f"communication {lane}", issued.kind, start - begin_s, end - begin_s, details))
        return sorted(spans, key=lambda span: span.start_s)
