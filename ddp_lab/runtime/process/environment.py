"""What a training process sets before torch is imported: variables that libraries read then, the allocator of glibc,
and the scheduling policy of Linux.

On a CPU, torch allocates each tensor with glibc and frees it there. Two defaults of glibc do not suit that:

- The allocator puts a small freed chunk into a cache of the thread and keeps it marked as used. torch aligns tensors to
  64 bytes, and glibc cuts such a small chunk off in front of an aligned tensor. The memory of a freed tensor then does
  not merge with the chunk before it and is too small for the next tensor of that size, so the heap grows: to 2.4 GiB
  for `zero3` with a model of 32 MiB (glibc 2.36). Without the cache it stays at 0.9 GiB.
- A large tensor has its own pages, which return to the system when it is freed, and so does the free end of the heap.
  The next tensor pays again for each page: a sixth of a step for `flat_ddp` with a model of 32 MiB.

Strategies that free memory in each step gain most, in memory and in time (docs/findings.md).

A Gloo thread that wakes up preempts the running thread. If that one holds the lock of a connection, Gloo spins on the
lock for milliseconds. Under Linux's batch policy a thread that wakes up waits for its turn, and steps with many small
messages take half as long (docs/findings.md).

With a GPU none of this changes: tensors come from torch's own allocator, and the effect on NCCL's threads is not
measured.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

KINETO, QUIET, WARNINGS = "KINETO_LOG_LEVEL", "6", "2"
"""How much the profiler says (libkineto's `LoggerOutputType`). Without a GPU all of it is noise. With one, a warning
says that CUPTI lacks the permission to trace; the only other sign is a trace without kernels."""
VARIABLE = "GLIBC_TUNABLES"
TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296"
"""No thread caches; no separate pages for large tensors; keep up to 4 GiB of free memory.
The GNU C Library Reference Manual, "Memory Allocation Tunables"."""
OF_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def prepare_process() -> None:
    """Set all of it. Call it first, since it may restart the process."""
    for name, value in quiet_libraries().items():
        os.environ.setdefault(name, value)
    if not has_gpu():
        schedule_as_batch()
        keep_freed_memory()


def has_gpu() -> bool:
    """Whether a GPU's driver is loaded, as far as that shows without importing torch."""
    return any(Path(path).exists() for path in OF_GPUS)


def quiet_libraries() -> dict[str, str]:
    """Variables that keep libraries quiet. They read them when they are imported."""
    return {
        KINETO: WARNINGS if has_gpu() else QUIET,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }


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


def keep_freed_memory() -> None:
    """Restart this process with `TUNABLES`, which glibc reads only at the start.

    Does nothing if the variable is already set, or without glibc.
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
