"""`torch.profiler` on every rank, and one gzip Chrome trace a window.

A collective that begins under the profiler and ends after it writes its end into memory that the profiler has freed by
then (seen in torch 2.15 with Gloo: a segmentation fault, now and then, some steps later). So a window ends only when
nothing is in flight; where an error ends it, the profiler is left running, since what is in flight may never end.
"""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from training.config import RunConfig
from training.distributed import Ranks
from training.errors import UserError
from training.watch.phases import phase

TRACE_NAME = "{run_id}.step{step}.pt.trace.json.gz"


class WindowProfiler:
    """Follows the training loop and writes a trace at the end of each window.

    Args:
        config: Gives the schedule; with `no_profile` nothing is ever recorded.
        trace_folder: Where this rank's traces go.
        run_id: Begins their names.
        settle: Waits for all communication that this rank has in flight.
        settling_steps: The first ones, which are not profiled whatever the schedule says (`Strategy.settling_steps`).
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
        self._enabled = not config.no_profile
        self._step = 0
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
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._enabled and kind is None:
            self._settle()
            self._profile.stop()

    @property
    def bends_this_step(self) -> bool:
        """Whether the current step runs under the profiler, warm-up included, so that its time says little."""
        return self._enabled and self._schedule(self._step) != ProfilerAction.NONE

    def step(self) -> None:
        """An optimizer step is done."""
        if self._enabled:
            if self._schedule(self._step) == ProfilerAction.RECORD_AND_SAVE:
                self._settle()
            self._profile.step()
        self._step += 1

    def _on_window_end(self, profiler: profile) -> None:
        path = self._folder / TRACE_NAME.format(run_id=self._run_id, step=profiler.step_num)
        try:
            with phase("writing a trace", in_profile=False):
                write_trace(profiler, path)
        except (OSError, EOFError) as error:  # said at the end of the run, which goes on meanwhile
            self.write_problem = f"cannot write {path}: {getattr(error, 'strerror', None) or error}"


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
        plain.with_name(f"{plain.name}.tmp").unlink(missing_ok=True)  # Kineto's own, which a full disk leaves
        zipped.unlink(missing_ok=True)


def ends_with_brace(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")


def require_window_fits(config: RunConfig, steps: int, settling_steps: int) -> None:
    """Refuse a profile schedule that the run is too short for.

    Raises:
        UserError: names both lengths.
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
