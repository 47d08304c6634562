"""What a training process sets before torch is imported: variables that libraries read then, Linux's scheduling
policy, and standard output and error that may be closed, full, or gone with their terminal or the reader of a pipe.

A Gloo thread that wakes up preempts the running thread. If that one holds the lock of a connection, Gloo spins on the
lock for milliseconds. Under Linux's batch policy a thread that wakes up waits for its turn, and steps with many small
messages take half as long (docs/results.md). With a GPU the policy stays as it is.
"""

import errno
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

KINETO, QUIET, WARNINGS = "KINETO_LOG_LEVEL", "6", "02"
"""How much the profiler says (libkineto's `LoggerOutputType`: warnings 2, stages 3, errors 4, USDT 5). Without a GPU
all of it is noise. With one, a warning says that CUPTI lacks the permission to trace; the only other sign is a trace
without kernels. libkineto reads `02` as 2. So spelled it is ours, not the user's."""
MARKS = (b"STAGE:", b"USDT:")
OF_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def prepare_process() -> None:
    """Set all of it. Call it before torch is imported."""
    for name, value in quiet_libraries().items():
        os.environ.setdefault(name, value)
    if not has_gpu():
        schedule_as_batch()


def has_gpu() -> bool:
    """Whether a GPU's driver is loaded, as far as that shows without importing torch."""
    return any(Path(path).exists() for path in OF_GPUS)


def sees_gpu() -> bool:
    """Whether torch will find a GPU, as far as that shows without importing it: a build without CUDA finds none."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return has_gpu() and not is_hidden and not version("torch").endswith("+cpu")


def quiet_libraries() -> dict[str, str]:
    """Variables that keep libraries quiet. They read them when they are imported."""
    return {
        KINETO: WARNINGS if has_gpu() else QUIET,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextmanager
def without_marks() -> Iterator[None]:
    """Within this context stderr is held back; afterwards it is passed on without libkineto's lines of two kinds, which
    no level leaves out alone. Not if the user has set the level. What Python writes is not held back, since the watcher
    may end the process meanwhile; what C++ writes is lost if the process dies within."""
    if os.environ.get(KINETO) != WARNINGS:
        yield
        return
    with os.fdopen(os.dup(2), "w", buffering=1) as stderr, os.fdopen(os.memfd_create("stderr"), "w+b") as captured:
        os.dup2(captured.fileno(), 2)
        try:
            with redirect_stderr(stderr):
                yield
        finally:
            os.dup2(stderr.fileno(), 2)
            captured.seek(0)
            stderr.buffer.write(b"".join(line for line in captured if not line.startswith(MARKS)))


def schedule_as_batch() -> None:
    """Give this process and its future threads the policy `SCHED_BATCH` of sched(7), under which a thread that wakes up
    does not preempt another. Another policy than the default stays, and so does one that the system does not let
    change."""
    if scheduling() == "other":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def scheduling() -> str | None:
    """Linux's scheduling policy of this process, by its name in chrt(1). None on other systems, or if unknown."""
    if not hasattr(os, "SCHED_BATCH"):
        return None
    try:
        policy = os.sched_getscheduler(0)
    except OSError:
        return None
    names = {os.SCHED_OTHER: "other", os.SCHED_BATCH: "batch", os.SCHED_IDLE: "idle"}
    return {**names, os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr"}.get(policy & ~os.SCHED_RESET_ON_FORK, "unknown")


def silence_libraries() -> None:
    """Keep warnings and progress bars of libraries off the terminal. Their errors are raised, and so not lost."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


class Output(io.FileIO):
    """A standard stream of this process. Once it cannot be written, what follows is dropped: no `print` raises an
    OSError.

    The program then `goes_on`, after a line on standard error; or it ends with code 1, and without that line where a
    pipe's reader has seen enough, as `head` does.
    """

    def __init__(self, descriptor: int, goes_on: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._goes_on = goes_on

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self._goes_on or error.errno != errno.EPIPE:
                then = "; the run goes on without" if self._goes_on else ""
                line = f"{'warning' if then else 'error'}: cannot write to standard output: {error.strerror}{then}\n"
                with suppress(OSError):
                    os.write(2, line.encode())
            if not self._goes_on:
                raise SystemExit(1) from None
            return len(data)


def guard_output(goes_on: bool) -> None:
    """Let `Output` write what this process and its forks print, whose characters a terminal may lack."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file or socket would get its number
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = guarded(sys.stdout, 1, goes_on), guarded(sys.stderr, 2, True)


def guarded(stream: TextIO | None, descriptor: int, goes_on: bool) -> TextIO:
    """In place of `stream`, which is None if it is closed."""
    raw, by_line = io.BufferedWriter(Output(descriptor, goes_on)), True
    if isinstance(stream, io.TextIOWrapper):
        by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(raw, getattr(stream, "encoding", None), "backslashreplace", line_buffering=by_line)
