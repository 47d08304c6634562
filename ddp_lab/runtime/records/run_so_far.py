"""What is known of a run so far. It is enough to write a record of the run whenever it ends."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from ddp_lab.collectives.calls import Call
from ddp_lab.machine import device_name, package_versions
from ddp_lab.record_format import (
    COMPLETED,
    SWEEP_VARIABLE,
    Ending,
    FlightRecord,
    RunRecord,
    SweepPass,
)
from ddp_lab.record_rows import Compiled, Traffic
from ddp_lab.runtime.config import RunConfig, choice_folder
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.distributed import RankContext, backend_class
from ddp_lab.runtime.errors import AgreedError, SequenceError, UserError, tell_torchrun
from ddp_lab.runtime.groups import gather_objects
from ddp_lab.runtime.link.speed import SimulatedLink
from ddp_lab.runtime.loop import TrainingResult
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.process.environment import scheduling
from ddp_lab.runtime.records.record import (
    make_run_id,
    step_statistics,
    timed_steps,
)
from ddp_lab.runtime.records.verdict import verdict
from ddp_lab.runtime.records.waits import arrivals, lateness, waits
from ddp_lab.runtime.watch.cause import FAILED, INTERRUPTED, MISMATCHED, RankReport
from ddp_lab.runtime.watch.flight_recorder import RankState
from ddp_lab.runtime.watch.phases import start_s
from ddp_lab.strategy.account import Collective, ModelSize
from ddp_lab.strategy.groups import on_mesh
from ddp_lab.strategy.strategy import Strategy
from ddp_lab.writing import to_json, write_json, write_text


class Setup(NamedTuple):
    """What is fixed when training begins. `optimizer` is the name of its class; `flops` are of a sample."""

    ranks: RankContext
    strategy: Strategy
    optimizer: str
    size: ModelSize
    workload: Workload
    flops: float | None


class RunSoFar:
    """What is known of the run. `steps` is 0, `run_id` empty and the rest None or empty until it is known."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.run_id, self.steps = config, "", 0
        self.result = TrainingResult()
        self.evaluation: Any = None
        self.generated: Any = None
        self.memory: list[Any] = []
        self.throughput: list[Any] = []
        self.resumed_from: Any = None
        self.latest_collectives: Callable[[], tuple[Call, ...]] = tuple
        self.stop_request: Callable[[], bool] = lambda: False
        self._traffic: list[Collective] = []
        self._setup: Setup | None = None
        self._backend_class = ""

    def begin(self, config: RunConfig, setup: Setup) -> None:
        """Training begins."""
        self.config, self._setup = config, setup
        self._backend_class = backend_class(setup.strategy.process_group, setup.ranks.device)

    def file(self, suffix: str) -> Path:
        """A file of this run beside its traces."""
        return choice_folder(self.config) / f"{self.run_id}.{suffix}"

    @property
    def _begun(self) -> Setup:
        assert self._setup is not None, "training has begun"
        return self._setup

    def following(self, on_step: Callable[[TrainingResult], None]) -> Callable[[TrainingResult], None]:
        """A function that keeps the result of each step, and then calls `on_step`."""

        def follow(result: TrainingResult) -> None:
            self.result = result
            if not self._traffic or len(result.loss) <= self._begun.strategy.settling_steps:
                self._traffic = self._expected_traffic()
            on_step(result)

        return follow

    def _expected_traffic(self) -> list[Collective]:
        clips = self.config.clip_grad_norm is not None
        traffic = self._begun.strategy.expected_traffic(self.config.grad_accum_steps, clips)
        rank = self._begun.ranks.rank if self._begun.strategy.is_in_pipeline else None
        named = on_mesh(traffic, Mesh.parse(self.config.mesh) if self.config.mesh else None)
        return [replace(collective, rank=rank) for collective in named]

    @property
    def _untimed(self) -> tuple[int, int]:
        """Steps that are not timed: those before the run resumed, and those in which the strategy settled."""
        return self.resumed_from["step"] if self.resumed_from else 0, self._begun.strategy.settling_steps

    def _statistics(self) -> dict[str, float | None]:
        return step_statistics(self.result.whole_steps(), *self._untimed)

    def gather_throughput(self) -> None:
        """Ask each rank for its own, and for its traffic if stages differ. Collective.

        It comes right after training, while the flight recorder holds the last steps.
        """
        statistics, ranks, result = self._statistics(), self._begun.ranks, self.result.whole_steps()
        timed, names = timed_steps(result, *self._untimed), ("samples_per_second", "tokens_per_second")
        own_row: dict[str, Any] = {"rank": ranks.rank} | {name: statistics[f"own_{name}"] for name in names}
        own_row |= waits(result, timed, ranks.device.type == "cuda")
        came = {} if self._begun.strategy.is_in_pipeline else arrivals(result, timed, self.latest_collectives())
        rows, hosts, calls = zip(*gather_objects((own_row, socket.gethostname(), came)), strict=True)
        self.throughput = [row | {"late_s": late_s} for row, late_s in zip(rows, lateness(calls, hosts), strict=True)]
        self._traffic = self._expected_traffic()
        if self._begun.strategy.is_in_pipeline:
            self._traffic = list(chain.from_iterable(gather_objects(self._traffic)))

    @property
    def step(self) -> int | None:
        """Optimizer steps done; None before training."""
        return len(self.result.loss) if self._setup else None

    def record(self, ending: Ending) -> dict[str, Any]:
        """The run record; `docs/run-record.md` explains each field. Training must have begun.

        A run that ends early records the traffic that was expected after its last step, and only this rank's stages:
        its training thread may be stuck in a collective, so other ranks cannot be asked.
        """
        # what began, and the steps so far
        ranks, strategy, optimizer, size, workload, flops = self._begun
        result = self.result.whole_steps()
        statistics, has_tokens = self._statistics(), any(result.tokens)
        rate = statistics["samples_per_second"]
        link = SimulatedLink.parse(self.config.link)
        # the machine, the settings, the steps, and what came of them
        record = RunRecord(
            choice=self.config.choice,
            run_id=self.run_id,
            ended=ending,
            sweep=msgspec.json.decode(os.environ.get(SWEEP_VARIABLE, "null"), type=SweepPass | None),
            world_size=ranks.world_size,
            backend=ranks.library,
            backend_class=self._backend_class,
            gpu_sharing=ranks.gpu_sharing,
            device=ranks.device.type,
            device_name=device_name(ranks.device),
            host=socket.gethostname(),
            threads=torch.get_num_threads(),
            scheduling=scheduling(),
            link_bits_per_s=link.bits_per_s if link else None,
            config=self.config.as_dict(),
            versions=package_versions(),
            parameters=size.elements,
            optimizer=optimizer,
            shards=sorted(strategy.shards),
            settling_steps=strategy.settling_steps,
            compile=Compiled(**strategy.compiled.as_record()) if strategy.compiled else None,
            expected_traffic=[Traffic(**collective.as_dict()) for collective in self._traffic],
            start_s=dict(start_s),
            train_samples=len(workload.train),
            step_samples=result.samples,
            step_time_s=result.step_time_s,
            step_tokens=result.tokens if has_tokens else None,
            step_lr=result.lr,
            step_grad_norm=result.grad_norm,
            step_expert_tokens=result.expert_load if self.config.has_experts else None,
            step_loss_scale=result.loss_scale if strategy.scaler else None,
            skipped_steps=[step for step, skipped in enumerate(result.skipped) if skipped],
            samples_per_second=rate,
            tokens_per_second=statistics["tokens_per_second"],
            step_time_median_s=statistics["step_time_median_s"],
            throughput=self.throughput,
            model_flops_per_sample=flops,
            model_flops_per_second=flops * rate if flops and rate else None,
            train_loss=result.loss,
            eval_samples=len(workload.evaluation),
            eval=self.evaluation,
            generated=self.generated,
            resumed_from=self.resumed_from,
            notes=[*workload.notes, *strategy.notes],
            memory=self.memory,
        )
        fields: dict[str, Any] = msgspec.to_builtins(record)
        return fields | {"verdict": verdict(fields) if ending.how == COMPLETED else []}

    @contextmanager
    def saying_errors(self, is_main: bool) -> Iterator[None]:
        """Within this context, rank 0 reports an error that every rank raises, while the process group still exists."""
        try:
            yield
        except AgreedError as error:
            error.is_said = True
            if is_main:
                how = MISMATCHED if isinstance(error, SequenceError) else FAILED
                self.report(Ending(how, error.rank, self.step, None, error.collective, str(error), error.traceback))
            raise

    def report(self, ending: Ending, reports: Mapping[int, RankReport] | None = None) -> None:
        """Print how the run ended in one line, and write its traceback and its record, which is there once training has
        begun. `torchrun` shows the line in its summary."""
        began_s = min((report.reason.time_s for report in (reports or {}).values() if report.reason), default=None)
        if ending.how == INTERRUPTED and self._setup is not None:
            place = f"{ending.message}, after step {self.step} of {self.steps}"
            ending = replace(ending, step=self.step, message=place)
        line = f"error: {self.config.label}: {ending.message}"
        if ending.traceback:
            line += self._write_last("traceback", "traceback.txt", ending.traceback)
        if self._setup is not None:
            line += self._write_last("record", "run.json", to_json(self.record(ending)))
        tell_torchrun(line, began_s)
        print(line, file=sys.stderr, flush=True)

    def _write_last(self, noun: str, suffix: str, text: str) -> str:
        """Write a file of a run that ends early, and say where: elsewhere if its own disk is full."""
        name = f"{self.run_id or make_run_id()}.{suffix}"
        problem: Exception | None = None
        for folder in (choice_folder(self.config), Path(os.environ.get("TMPDIR", "/tmp"))):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_text(folder / name, text)
                return f"; {noun}: {folder / name}"
            except (OSError, UserError) as error:
                problem = problem or error
        return f"; no {noun}: {problem}"

    def keep_flight(self, rank: int, state: RankState) -> None:
        """Write the flight record of a rank that ends beside the run record, and remove its unfinished trace."""
        if not self.run_id or self._setup is None:
            return
        for part in choice_folder(self.config).glob(f"rank_{rank}/.{self.run_id}.*"):
            part.unlink(missing_ok=True)
        record = FlightRecord(
            rank=state.rank,
            world_size=self._setup.ranks.world_size,
            step=state.step,
            phase=state.phase,
            written_s=time.time(),
            entries=list(state.entries),
        )
        try:
            write_json(self.file(f"rank_{rank}.flight.json"), msgspec.to_builtins(record))
        except (OSError, UserError):
            return  # `report` says why nothing can be written
