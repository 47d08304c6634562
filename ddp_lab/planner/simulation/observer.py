"""What happens in the simulated step that counts."""

from ddp_lab.planner.contracts import OperatorCall
from ddp_lab.planner.simulation.network import Issued
from ddp_lab.runtime.loop import Unwatched


class StepObserver(Unwatched):
    """Keeps the operators and collectives of a step. The training loop has it in a profiler's place.

    Attributes:
        issued: Collectives that the step has issued.
        computed: Operators, each with its phase, start and end.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """The step that counts begins."""
        self.issued: list[Issued] = []
        self.computed: list[tuple[OperatorCall, str, float, float]] = []
