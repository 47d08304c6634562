"""What happens in the simulated step that counts, and the spans that are told of it."""

from planner.clock import Clock
from planner.contracts import OperatorCall, Span
from planner.network import Issued


class Recording:
    """Follows the training loop, and keeps what happens in its last step.

    Attributes:
        compute: Operators, with start and end in seconds of the clock, and the phase of the step.
        phases: Parts of the step with start and end, those within others left out.
        issued: Collectives that the step has issued, and the phase.
        earlier: Collectives that were issued before, and not yet done when the step began.
    """

    slows_this_step = False

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.compute: list[tuple[OperatorCall, float, float, str]] = []
        self.issued: list[tuple[Issued, str]] = []
        self.earlier: list[tuple[Issued, str]] = []
        self.phases: list[tuple[str, float, float]] = []
        self.is_on = False

    def start(self) -> None:
        """The step that counts begins."""
        self.earlier = [entry for entry in self.issued if not entry[0].flight.is_done]
        self.issued, self.is_on = [], True

    def on_compute(self, call: OperatorCall, start_s: float, phase: str) -> None:
        if self.is_on:
            self.compute.append((call, start_s, self.clock.now_s, phase))

    def on_phase(self, name: str, start_s: float) -> None:
        if self.is_on:
            self.phases.append((name, start_s, self.clock.now_s))

    def step(self) -> None:
        """The training loop's: nothing to do."""

    def spans(self, begin_s: float, end_s: float) -> list[Span]:
        """What lies between two moments, and of what goes beyond them the part that does."""
        spans = [
            Span("compute", call.name, start - begin_s, end - begin_s, {"phase": phase, "call": call})
            for call, start, end, phase in self.compute
        ]
        spans += [Span("phase", name, start - begin_s, end - begin_s) for name, start, end in self.phases]
        free: list[float] = []  # for each lane of communication, when it is free again
        flights = sorted([*self.earlier, *self.issued], key=lambda entry: entry[0].flight.began_s or 0.0)
        for issued, phase in flights:
            flight = issued.flight
            start, end = max(flight.began_s or 0.0, begin_s), min(flight.ended_s or end_s, end_s)
            if flight.began_s is None or end <= start:
                continue
            lane = next((index for index, until in enumerate(free) if until <= start), len(free))
            free[lane : lane + 1] = [end]
            details = {
                "phase": phase,
                "payload_bytes": issued.payload_bytes,
                "group_size": len(issued.ranks),
                "group": issued.group_name,
                "backend": issued.backend,
                "dtype": issued.dtype,
                "issued_s": flight.issued_s - begin_s,
                "link": flight.cost.link,
            }
            spans.append(Span(f"communication {lane}", issued.kind, start - begin_s, end - begin_s, details))
        return sorted(spans, key=lambda span: span.start_s)
