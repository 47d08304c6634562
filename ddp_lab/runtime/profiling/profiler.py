"""Runs `torch.profiler` on every rank, and writes one gzip Chrome trace per window.

A collective that begins under the profiler and ends after it writes into memory that the profiler has freed. With torch
2.15 and Gloo this sometimes causes a segmentation fault some steps later. So a window ends only when nothing is in
flight. If an error ends the run, the profiler is left running, because a collective in flight may never end.
"""

import gzip
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.speed import NONE
from ddp_lab.runtime.profiling.gpu_tools import MemorySnapshots, NsysWindow
from ddp_lab.runtime.watch.phases import phase

TRACE_NAME = "{run_id}.step{step}.pt.trace.json.gz"
RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class WindowPart(Protocol):
    """What else happens in profile windows of a rank."""

    def open(self) -> None:
        """The run's first step follows."""

    def begin_step(self, step: int, is_first: bool) -> None:
        """A step of a window, `is_first` or not, follows `step` earlier steps of the run."""

    def end_step(self, steps_done: int, is_last: bool) -> None:
        """The step is done, and nothing is in flight after the last of a window.

        Raises:
            OSError: a file cannot be written.
        """

    def close(self) -> None:
        """The run's last step is done."""


class WindowProfiler:
    """Follows the training loop and writes a trace at the end of each window.

    Args:
        config: Its schedule is used. On a rank that it does not profile, nothing is recorded.
        trace_folder: For this rank's traces.
        run_id: The first part of their names.
        settle: Waits for all communication that this rank has in flight.
        settling_steps: So many first steps are never profiled (`Strategy.settling_steps`).

    Attributes:
        write_problem: Why the last trace could not be written; None if all were.
    """

    def __init__(
        self,
        config: RunConfig,
        trace_folder: Path,
        run_id: str,
        ranks: Ranks,
        settle: Callable[[], None],
        settling_steps: int = 0,
    ) -> None:
        self._folder, self._run_id, self._settle = trace_folder, run_id, settle
        self._schedule = schedule(
            skip_first=config.steps_before_profile(settling_steps),
            wait=config.profile_wait,
            warmup=config.profile_warmup,
            active=config.profile_active,
            repeat=config.profile_repeat,
        )
        self._slows_any, self._enabled = not config.no_profile, config.profiles(ranks.rank)
        self._slow_steps = config.profile_steps(settling_steps) if config.memory_snapshot else 0
        self._step = 0
        self._keeps_windows = True
        self.write_problem: str | None = None
        self._parts = parts_of(config, trace_folder, run_id) if self._enabled else []
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if ranks.device.type == "cuda" else [])
        self._profile = profile(
            activities=activities,
            schedule=self._schedule,
            on_trace_ready=self._on_window_end,
            record_shapes=True,
            profile_memory=True,
            # On paced links other threads than the training thread run `paced::` operators (runtime/link/spans.py).
            experimental_config=_ExperimentalConfig(profile_all_threads=config.link != NONE),
        )
        self._traces = self._enabled and not config.nsys

    def __enter__(self) -> "WindowProfiler":
        for part in self._parts:
            part.open()
        if self._traces:
            self._profile.start()
        self._begin_step()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._traces and kind is None:
            self._settle()
            self._keeps_windows = False  # a run that was asked to stop may end within one
            self._profile.stop()
        for part in self._parts:
            part.close()

    @property
    def slows_this_step(self) -> bool:
        """Whether the profiler runs in the current step, on any rank; it does in warm-up steps too."""
        is_profiled = self._schedule(self._step) != ProfilerAction.NONE
        return self._slows_any and (is_profiled or self._step < self._slow_steps)

    def step(self) -> None:
        """An optimizer step is done."""
        action = self._schedule(self._step)
        ends_window = action == ProfilerAction.RECORD_AND_SAVE
        self._step += 1
        if self._enabled and ends_window:
            self._settle()
        if action in RECORDING:
            for part in self._parts:
                with self._noting_problems(self._folder):
                    part.end_step(self._step, ends_window)
        if self._traces:
            self._profile.step()
        self._begin_step(ends_window or action not in RECORDING)

    def _begin_step(self, is_first: bool = True) -> None:
        if self._schedule(self._step) in RECORDING:
            for part in self._parts:
                part.begin_step(self._step, is_first)

    def _on_window_end(self, profiler: profile) -> None:
        if not self._keeps_windows:
            return
        path = self._folder / TRACE_NAME.format(run_id=self._run_id, step=profiler.step_num)
        with self._noting_problems(path), phase("writing a trace", in_profile=False):
            write_trace(profiler, path)

    @contextmanager
    def _noting_problems(self, path: Path) -> Iterator[None]:
        """The run continues although `path` cannot be written, and reports this at its end."""
        try:
            yield
        except (OSError, EOFError) as error:
            self.write_problem = f"cannot write {path}: {getattr(error, 'strerror', None) or error}"


def parts_of(config: RunConfig, folder: Path, run_id: str) -> list[WindowPart]:
    parts: list[WindowPart] = [NsysWindow()] if config.nsys else []
    return parts + ([MemorySnapshots(folder, run_id, config.profile_repeat)] if config.memory_snapshot else [])


def write_trace(profiler: profile, path: Path) -> None:
    """Write the window as a gzip Chrome trace, whole or not at all.

    Raises:
        OSError: it cannot be written.
        EOFError: the profiler wrote only a part of it. On a full disk it does so without an error.
    """
    plain, zipped = path.with_name(f".{path.name}.json"), path.with_name(f".{path.name}.tmp")
    try:
        plain.touch()
        profiler.export_chrome_trace(str(plain))
        if not ends_with_brace(plain):
            raise EOFError("the trace was cut short; is the disk full?")
        with plain.open("rb") as source, gzip.open(zipped, "wb", compresslevel=4) as target:
            shutil.copyfileobj(source, target)
        zipped.replace(path)
    finally:
        plain.unlink(missing_ok=True)
        plain.with_name(f"{plain.name}.tmp").unlink(missing_ok=True)  # Kineto leaves it on a full disk
        zipped.unlink(missing_ok=True)


def ends_with_brace(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")


def require_window_fits(config: RunConfig, steps: int, settling_steps: int) -> None:
    """Check that the run is long enough for its profile schedule.

    Raises:
        UserError: it is not; names both lengths.
    """
    needed = config.profile_steps(settling_steps)
    if not config.no_profile and needed > steps:
        first = config.steps_before_profile(settling_steps)
        settling = f"{first} in which {config.choice} settles + " if first else ""
        raise UserError(
            f"the profile windows end after {needed} optimizer steps ({settling}--profile-repeat "
            f"{config.profile_repeat} x (wait {config.profile_wait} + warmup {config.profile_warmup} + active "
            f"{config.profile_active})), but the run has {steps}; lower them, raise --max-steps, or use --no-profile"
        )


def require_tools_work(config: RunConfig, device: torch.device) -> None:
    """Check that what shows GPUs has one to show.

    Raises:
        UserError: it does not; says what to do.
    """
    for flag, wanted in (("--nsys", config.nsys), ("--memory-snapshot", config.memory_snapshot)):
        if wanted and config.no_profile:
            raise UserError(f"{flag}: shows profile windows, which --no-profile leaves out; give one or the other")
        if wanted and device.type != "cuda":
            raise UserError(
                f"{flag}: shows what a GPU does, and this run has none (device {device.type}); leave it out"
            )
