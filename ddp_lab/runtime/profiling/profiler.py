"""Runs `torch.profiler` on every rank, and writes one gzip Chrome trace per window.

A collective that begins under the profiler and ends after it writes into memory that the profiler has freed. With torch
2.15 and Gloo this sometimes causes a segmentation fault some steps later. So a window ends only when nothing is in
flight. If an error ends the run, the profiler is left running, because a collective in flight may never end.
"""

import gzip
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.link.speed import NONE
from ddp_lab.runtime.loop import StepFollower
from ddp_lab.runtime.process.environment import without_marks
from ddp_lab.runtime.watch.phases import phase
from ddp_lab.writing import written_whole

TRACE_NAME = "{run_id}.step{step}.pt.trace.json.gz"


class QuietProfile(profile):
    """torch's, without a few lines on stderr at the beginning and end of each window."""

    def start_trace(self) -> None:
        with without_marks():
            super().start_trace()

    def stop_trace(self) -> None:
        with without_marks():
            super().stop_trace()


class WindowProfiler(StepFollower):
    """Follows the training loop and writes a trace of `config`'s schedule at the end of each window.

    The first `settling_steps` are never profiled (`Strategy.settling_steps`). `settle` waits for all communication that
    this rank has in flight. `write_problem`: why the last trace could not be written; None if all were.
    """

    def __init__(
        self,
        config: RunConfig,
        trace_folder: Path,
        run_id: str,
        ranks: RankContext,
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
        self._step = 0
        self._keeps_windows = True
        self.write_problem: str | None = None
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if ranks.device.type == "cuda" else [])
        self._profile = QuietProfile(
            activities=activities,
            schedule=self._schedule,
            on_trace_ready=self._on_window_end,
            record_shapes=True,
            profile_memory=True,
            # On paced links other threads than the training thread run `paced::` operators (runtime/link/delivery.py).
            experimental_config=_ExperimentalConfig(profile_all_threads=config.link != NONE),
        )

    def __enter__(self) -> "WindowProfiler":
        if self._enabled:
            self._profile.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._enabled and kind is None:
            self._settle()
            self._keeps_windows = False  # a run that was asked to stop may end within one
            self._profile.stop()

    @property
    def slows_this_step(self) -> bool:
        """Whether the profiler runs in the current step, on any rank; it does in warm-up steps too."""
        return self._slows_any and self._schedule(self._step) != ProfilerAction.NONE

    def step(self) -> None:
        """An optimizer step is done."""
        ends_window = self._schedule(self._step) == ProfilerAction.RECORD_AND_SAVE
        self._step += 1
        if self._enabled:
            if ends_window:
                self._settle()
            self._profile.step()

    def _on_window_end(self, profiler: profile) -> None:
        if not self._keeps_windows:
            return
        path = self._folder / TRACE_NAME.format(run_id=self._run_id, step=profiler.step_num)
        with phase("writing a trace", in_profile=False):
            try:
                write_trace(profiler, path)
            except (OSError, EOFError) as error:  # the run continues, and fails at its end
                is_first, reason = self.write_problem is None, getattr(error, "strerror", None) or error
                self.write_problem = f"cannot write {path}: {reason}"
                if is_first and os.environ.get("LOCAL_RANK") == "0":
                    print(f"warning: {self.write_problem}; the run goes on", file=sys.stderr, flush=True)


def write_trace(profiler: profile, path: Path) -> None:
    """Write the window as a gzip Chrome trace, whole or not at all. On a full disk the profiler writes only a part of
    it, without an error: EOFError."""
    plain = path.with_name(f".{path.name}.json")
    try:
        plain.touch()
        profiler.export_chrome_trace(str(plain))
        if not ends_with_brace(plain):
            raise EOFError("the trace was cut short; is the disk full?")
        with (
            written_whole(path) as zipped,
            plain.open("rb") as source,
            gzip.open(zipped, "wb", compresslevel=4) as target,
        ):
            shutil.copyfileobj(source, target)
    finally:
        plain.unlink(missing_ok=True)
        plain.with_name(f"{plain.name}.tmp").unlink(missing_ok=True)  # Kineto leaves it on a full disk


def ends_with_brace(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")
