"""What a process that trains sets before torch is imported: what libraries read then, how glibc allocates, and how the
kernel schedules.

On a CPU, torch takes each tensor from glibc and gives it back when it is freed. Two defaults of glibc do not suit that:

- A small piece that is freed goes into a cache of its thread, and stays marked as in use. torch asks for addresses at
  multiples of 64 bytes, for which such a piece is cut off in front of the tensor. So the place of a freed tensor does
  not grow together with what lies before it, is too small for the next tensor of that size, and the heap grows: to
  2.4 GiB of `zero3` for a model of 32 MiB (glibc 2.36). Without the cache it stays at 0.9 GiB.
- A large tensor has pages of its own, which go back to the system with it, as does the end of the heap when it is free.
  The next tensor pays for each page anew: `flat_ddp` for a model of 32 MiB a sixth of its step.

Strategies that give memory back in each step gain most, in memory and in time (docs/findings.md).

And a thread of Gloo that wakes takes the core from the one that runs. Where that one holds a connection's lock, Gloo's
loop asks for it again and again, for milliseconds. Threads of Linux's batch policy wait for their turn instead, and
steps of many small messages take half as long (docs/findings.md).

Where there is a GPU, nothing of this is changed: tensors come from torch's own allocator there, and what NCCL's threads
would gain has not been measured.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

ENVIRONMENT = {
    "KINETO_LOG_LEVEL": "6",  # no profiler noise where there is no GPU
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What libraries read when they are imported."""
VARIABLE = "GLIBC_TUNABLES"
TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296"
"""No caches of threads; no tensor has pages of its own, however large; keep up to 4 GiB free.
The GNU C Library Reference Manual, "Memory Allocation Tunables"."""
OF_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def prepare_process() -> None:
    """All of it. Starts the process anew if it has to, so call it first."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not any(Path(path).exists() for path in OF_GPUS):
        schedule_as_batch()
        keep_freed_memory()


def schedule_as_batch() -> None:
    """Have this process's threads, those to come included, not take cores from each other when they wake: `SCHED_BATCH`
    of sched(7). A policy that the user has chosen stays, as does one that the system lets nobody change."""
    if scheduling() == "other":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def scheduling() -> str | None:
    """Linux's policy of this process, as chrt(1) calls it; None elsewhere, and where the system does not say."""
    if not hasattr(os, "SCHED_BATCH"):
        return None
    try:
        policy = os.sched_getscheduler(0)
    except OSError:
        return None
    names = {os.SCHED_OTHER: "other", os.SCHED_BATCH: "batch", os.SCHED_IDLE: "idle"}
    return {**names, os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr"}.get(policy & ~os.SCHED_RESET_ON_FORK, "unknown")


def keep_freed_memory() -> None:
    """Start this process anew with `TUNABLES`, which glibc reads only then.

    Returns where the variable is set already, by whomever, and where there is no glibc.
    """
    if VARIABLE in os.environ or not has_glibc() or not sys.executable:
        return
    os.environ[VARIABLE] = TUNABLES
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def has_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # not Unix, or another library
        return False
