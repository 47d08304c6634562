"""What happens in the simulated step that counts."""

from ddp_lab.planner.contracts import OperatorCall, Span
from ddp_lab.planner.simulation.network import Issued
from ddp_lab.runtime.loop import Unwatched


class StepObserver(Unwatched):
    """Keeps the operators and collectives of a step. The training loop has it in a profiler's place.

    Attributes:
        issued: Collectives that the step has issued.
        computed: Operators, each with its phase, start and end.
    """

    def __init__(self) -> None:
        self._earlier: list[Issued] = []
        self.issued: list[Issued] = []
        self.computed: list[tuple[OperatorCall, str, float, float]] = []

    def start(self) -> None:
        """The step that counts begins. Collectives that are not done yet reach into it."""
        self._earlier = [issued for issued in self.issued if not issued.flight.is_done]
        self.issued, self.computed = [], []

    def spans(self, begin_s: float, end_s: float) -> list[Span]:
        """What lies between two moments; of a collective that reaches beyond them, the part that does."""
        spans = [
            Span("compute", call.name, start - begin_s, end - begin_s, {"call": call, "phase": phase})
            for call, phase, start, end in self.computed
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
