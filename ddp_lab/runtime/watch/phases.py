"""The phase that this rank is in. It shows in the rank's profile and in its flight recorder, in how long the start
took, until the first optimizer step is done, and in a line where one lasts long. Imports nothing heavy."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

LOOP = "training loop"
"""The phase between the named parts of a step."""
IMPORTING, READING, BUILDING, FIRST_STEP = "importing", "reading data", "building the model", "first step"
SAY_AFTER_S, SAY_EVERY_S, LOOK_EVERY_S = 5.0, 10.0, 1.0


def process_stat(pid: int | str) -> list[str]:
    """What proc(5) tells of a process, from its state on; empty where the system is not Linux, or the process gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def state_of(pid: int) -> str:
    """The letter of proc(5) for the state of a process: of one that is stopped T or t, of a zombie Z. `?` if the system
    does not tell."""
    return next(iter(process_stat(pid)), "?")


def kills_for_memory() -> int:
    """How many processes the kernel has killed because memory ran out, since it started; 0 if it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def process_age_s() -> float:
    """Seconds since this process began; 0 where the system is not Linux."""
    stat = process_stat("self")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf("SC_CLK_TCK") if stat else 0.0


_record: Callable[[int, str], None] | None = None
_step, _phase = -1, IMPORTING
_since, _is_starting = time.monotonic() - process_age_s(), True
start_s: dict[str, float] = {}
"""Seconds of each phase of the start, in their order, and of the first step."""
waited: defaultdict[str, float] = defaultdict(float)
"""Of the training thread, since its process began: seconds in which it loaded `data`, and waited in `collectives` and
for its `device`; how many collectives were `issued`, and how many of them Python `awaited`."""


@contextmanager
def waiting(activity: str) -> Iterator[None]:
    """What is done within this context counts as `waited[what]`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        waited[activity] += time.perf_counter() - began


_schedstat = threading.local()


def waited_for_core_s() -> float:
    """Seconds in which this thread could run but had no core; 0 where the system is not Linux."""
    try:
        if not hasattr(_schedstat, "file"):
            _schedstat.file = Path("/proc/thread-self/schedstat").open("rb", buffering=0)  # noqa: SIM115
        _schedstat.file.seek(0)
        return int(_schedstat.file.read(128).split()[1]) / 1e9  # sched-stats.rst of the kernel
    except (OSError, IndexError):
        return 0.0


def host_time() -> dict[str, float]:
    """`waited` until now; `core`: `waited_for_core_s`; and `now`, in seconds since the epoch."""
    return waited | {"core": waited_for_core_s(), "now": time.time()}


def record_phases_in(record: Callable[[int, str], None] | None) -> None:
    """From now on, tell each step and phase to `record`, as of a flight recorder; None: nobody, the run has ended."""
    global _record, _step, _phase, _since, _is_starting
    _record = record
    if record is None:
        _step, _phase, _since, _is_starting = -1, IMPORTING, time.monotonic(), True
        start_s.clear()


def start_so_far() -> dict[str, float]:
    """`start_s`, and seconds of the phase that has not ended."""
    return start_s | {_phase: start_s.get(_phase, 0.0) + time.monotonic() - _since}


@contextmanager
def long_phases_said(label: str) -> Iterator[None]:
    """Within this context, a line on standard output says what this process is at, where that takes long: in the start,
    the first step, and what comes after training. Later steps have lines of their own."""
    has_ended, begun = threading.Event(), time.monotonic()

    def look() -> None:
        at, since, due = _phase, begun, begun + SAY_AFTER_S
        while not has_ended.wait(LOOK_EVERY_S):
            doing, now = _phase if _step < 0 else FIRST_STEP if _is_starting else "", time.monotonic()
            if doing != at:
                at, since, due = doing, now, now + SAY_AFTER_S
            elif at and now >= due:
                print(f"{label}: {at}, {now - since:.0f} s so far", flush=True)
                due = now + SAY_EVERY_S

    looking = threading.Thread(target=look, name="phases", daemon=True)
    looking.start()
    try:
        yield
    finally:
        has_ended.set()
        looking.join()


def begin_step(step: int) -> None:
    """An optimizer step begins, after `step` earlier ones."""
    _enter(step, LOOP)


def current_step() -> int:
    """Optimizer steps done before the current one; -1 outside training."""
    return _step


def between_steps(name: str) -> None:
    """The run begins something outside its optimizer steps, such as evaluation."""
    _enter(-1, name)


@contextmanager
def during(name: str) -> Iterator[None]:
    """What is done within this context has a name of its own, and is part of no optimizer step."""
    before = _step, _phase
    between_steps(name)
    yield
    _enter(*before)


def _enter(step: int, name: str) -> None:
    global _step, _phase, _since, _is_starting
    if _is_starting:
        now, part = time.monotonic(), _phase if _step < 0 else FIRST_STEP
        start_s[part] = start_s.get(part, 0.0) + now - _since
        _since, _is_starting = now, _step in (-1, step)
    _step, _phase = step, name
    if _record is not None:
        _record(step, name)


@contextmanager
def phase(name: str, in_profile: bool = True) -> Iterator[None]:
    """A part of an optimizer step. After an error, the recorder keeps the phase that failed.

    Elsewhere, as in an evaluation, the recorder keeps what the run is at, which says more.
    """
    from torch.profiler import record_function  # takes seconds, once

    before = _phase
    if _step >= 0:
        _enter(_step, name)
    with record_function(name) if in_profile else nullcontext():
        yield
    if _step >= 0:
        _enter(_step, before)
