"""`torch.profiler` on every rank, one gzip Chrome trace a window, and the peak of memory in it."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from training.config import RunConfig
from training.distributed import Ranks
from training.errors import UserError
from training.strategy import Strategy

TRACE_NAME = "{run_id}.step{step}.pt.trace.json.gz"


class WindowProfiler:
    """Follows the training loop and writes a trace at the end of each window.

    Args:
        config: Gives the schedule; with `no_profile` nothing is ever recorded.
        trace_folder: Where this rank's traces go.
        run_id: Begins their names.
        strategy: Asked for the memory that it holds when a window begins.
    """

    def __init__(self, config: RunConfig, trace_folder: Path, run_id: str, ranks: Ranks, strategy: Strategy) -> None:
        self._folder, self._run_id, self._device, self._strategy = trace_folder, run_id, ranks.device, strategy
        self._schedule = schedule(
            wait=config.profile_wait,
            warmup=config.profile_warmup,
            active=config.profile_active,
            repeat=config.profile_repeat,
        )
        self._enabled = not config.no_profile
        self._step = 0
        self._resting_bytes = 0
        self.peak_bytes: int | None = None
        self.write_problem: str | None = None
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if ranks.device.type == "cuda" else [])
        self._profile = profile(
            activities=activities,
            schedule=self._schedule,
            on_trace_ready=self._on_window_end,
            record_shapes=True,
            profile_memory=True,
        )

    def __enter__(self) -> "WindowProfiler":
        if self._enabled:
            self._profile.start()
            self._note_resting_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            self._profile.stop()

    @property
    def bends_this_step(self) -> bool:
        """Whether the current step runs under the profiler, warm-up included, so that its time says little."""
        return self._enabled and self._schedule(self._step) != ProfilerAction.NONE

    def step(self) -> None:
        """An optimizer step is done."""
        self._step += 1
        if self._enabled:
            self._profile.step()
            self._note_resting_bytes()

    def _note_resting_bytes(self) -> None:
        recording = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        begins = self._step == 0 or self._schedule(self._step - 1) != ProfilerAction.RECORD
        if self._schedule(self._step) in recording and begins:
            # Freeing what was allocated before the window makes no event, so let the last gradients go first.
            self._strategy.zero_grad()
            self._resting_bytes = sum(self._strategy.memory_breakdown().values())

    def _on_window_end(self, profiler: profile) -> None:
        if self._device.type == "cpu":
            peak = self._resting_bytes + peak_of_allocations(profiler)
            self.peak_bytes = max(peak, self.peak_bytes or 0)
        path = self._folder / TRACE_NAME.format(run_id=self._run_id, step=profiler.step_num)
        try:
            write_trace(profiler, path)
        except (OSError, EOFError) as error:  # said at the end of the run, which goes on meanwhile
            self.write_problem = f"cannot write {path}: {error.strerror or error}"  # type: ignore[union-attr]


def peak_of_allocations(profiler: profile) -> int:
    """Most CPU bytes that were allocated at one moment of the window, beyond those allocated at its start."""
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes: list[tuple[int, int]] = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def write_trace(profiler: profile, path: Path) -> None:
    """Write the window as gzip Chrome trace, whole or not at all.

    Raises:
        OSError: it cannot be written.
        EOFError: the profiler wrote only a part of it, as it does without a word on a full disk.
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
        zipped.unlink(missing_ok=True)


def ends_with_brace(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")


def require_window_fits(config: RunConfig, steps: int) -> None:
    """Refuse a profile schedule that the run is too short for.

    Raises:
        UserError: names both lengths.
    """
    if not config.no_profile and config.profile_steps() > steps:
        raise UserError(
            f"the profile windows end after {config.profile_steps()} optimizer steps (--profile-repeat "
            f"{config.profile_repeat} x (wait {config.profile_wait} + warmup {config.profile_warmup} + active "
            f"{config.profile_active})), but the run has {steps}; lower them, raise --max-steps, or use --no-profile"
        )
