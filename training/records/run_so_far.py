"""What is known of a run while it goes on: enough for a record that says how it ended, whenever it does."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from training.communication.traffic import Collective
from training.config import RunConfig
from training.data.workload import Workload
from training.distributed import Ranks
from training.errors import AgreedError, SequenceError, UserError, tell_torchrun
from training.loop import TrainingResult
from training.profiling.memory import ModelSize
from training.records.record import choice_folder, run_record, write_json
from training.strategy import Strategy
from training.watch.board import Place
from training.watch.cause import COMPLETED, FAILED, MISMATCHED, Ending, Seen

FLIGHT_VERSION = 1


class RunSoFar:
    """Filled in as the run goes on.

    Attributes:
        run_id: Empty until the ranks have agreed on one.
        evaluation: None until there is one.
        memory: Empty until it is recorded.
        resumed_from: Of a run that goes on from a checkpoint, which one.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.run_id = config, ""
        self.result = TrainingResult()
        self.evaluation: dict[str, Any] | None = None
        self.memory: list[dict[str, Any]] = []
        self.resumed_from: dict[str, Any] | None = None
        self._traffic: list[Collective] = []
        self._facts: tuple[Ranks, Strategy, str, ModelSize, Workload] | None = None

    def begin(
        self, config: RunConfig, ranks: Ranks, strategy: Strategy, optimizer: str, size: ModelSize, workload: Workload
    ) -> None:
        """Training begins."""
        self.config, self._facts = config, (ranks, strategy, optimizer, size, workload)

    def following(self, on_step: Callable[[TrainingResult], None]) -> Callable[[TrainingResult], None]:
        """`on_step`, and the result is kept."""

        def follow(result: TrainingResult) -> None:
            self.result = result
            if not self._traffic or self._is_settling(len(result.loss)):
                self._traffic = self._expected_traffic()
            on_step(result)

        return follow

    def _is_settling(self, step: int) -> bool:
        assert self._facts is not None, "training has begun"
        return step <= self._facts[1].settling_steps

    def _expected_traffic(self) -> list[Collective]:
        assert self._facts is not None, "training has begun"
        return self._facts[1].expected_traffic(self.config.grad_accum_steps, self.config.clip_grad_norm is not None)

    @property
    def step(self) -> int | None:
        """Optimizer steps done; None before training."""
        return len(self.result.loss) if self._facts else None

    def record(self, ending: Ending) -> dict[str, Any]:
        """The run record. Training must have begun.

        That of a run that ends early has the traffic that was expected once the strategy had settled: now the training
        thread may be stuck in a collective, and DDP answers no question meanwhile.
        """
        assert self._facts is not None, "training has begun"
        ranks, strategy, optimizer, size, workload = self._facts
        traffic = self._expected_traffic() if ending.how == COMPLETED else self._traffic
        return run_record(
            self.config,
            ranks,
            self.run_id,
            strategy,
            optimizer,
            self.result.whole_steps(),
            self.evaluation,
            size,
            self.memory,
            workload,
            traffic,
            ending,
            self.resumed_from,
        )

    @contextmanager
    def saying_errors(self, is_main: bool) -> Iterator[None]:
        """Within this context, rank 0 reports an error that every rank raises, while the process group is there."""
        try:
            yield
        except AgreedError as error:
            error.is_said = True
            if is_main:
                how = MISMATCHED if isinstance(error, SequenceError) else FAILED
                self.report(Ending(how, error.rank, self.step, None, error.collective, str(error)))
            raise

    def report(self, ending: Ending, seen: Mapping[int, Seen] | None = None) -> None:
        """Print how the run ended in one line and write its record. Before training there is no record: then the
        traceback is printed too. `torchrun` shows the line in its summary."""
        said = f"error: {self.config.choice}: {ending.message}"
        began_s = min((one.statement.time_s for one in (seen or {}).values() if one.statement), default=None)
        if self._facts is None:
            tell_torchrun(said, began_s)
            print(said, ending.traceback or "", sep="\n" if ending.traceback else "", file=sys.stderr, flush=True)
            return
        path = choice_folder(self.config) / f"{self.run_id}.run.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, self.record(ending))
            said += f"; record: {path}"
        except (OSError, UserError) as error:
            said += f"; no record: {error}"
        tell_torchrun(said, began_s)
        print(said, file=sys.stderr, flush=True)

    def keep_flight(self, rank: int, place: Place) -> None:
        """Write the latest collectives of a rank that ends beside the run record (`docs/run-record.md`).

        A trace of which it has written only a part is removed.
        """
        if not self.run_id or self._facts is None:
            return
        path = choice_folder(self.config) / f"{self.run_id}.rank_{rank}.flight.json"
        for part in choice_folder(self.config).glob(f"rank_{rank}/.{self.run_id}.*"):
            part.unlink(missing_ok=True)
        try:
            write_json(path, flight_record(place, self._facts[0].world_size))
        except (OSError, UserError):
            return  # the report says why nothing can be written


def flight_record(place: Place, world_size: int) -> dict[str, Any]:
    """The latest collectives of a rank, oldest first, and where it was."""
    names = ("seq", "kind", "elements", "dtype", "group", "state", "time_s")
    return {
        "version": FLIGHT_VERSION,
        "rank": place.rank,
        "world_size": world_size,
        "step": place.step,
        "phase": place.phase,
        "written_s": time.time(),
        "entries": [{name: getattr(entry, name) for name in names} for entry in place.entries],
    }
