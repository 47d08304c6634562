"""What this machine's processor does, measured: it stands in no data sheet by the thread."""

import os
import time
from collections.abc import Callable
from functools import cache, partial
from statistics import median

import torch

from planner.cluster import Device
from training.record import cpu_name

SIDE = 1024
COPIED_BYTES = 64 * 2**20
REPEATS = 5


@cache
def cpu() -> Device:
    """One rank's processor, with as many threads as torch uses now: rates of a matrix product and of a copy, the median
    of five, and all of the machine's memory. Takes a fraction of a second, once a process."""
    flops_per_s = {}
    for name in ("float32", "bfloat16"):
        matrix = torch.ones(SIDE, SIDE, dtype=getattr(torch, name))
        out = torch.empty_like(matrix)
        flops_per_s[name] = 2 * SIDE**3 / seconds(partial(torch.mm, matrix, matrix, out=out))
    source, target = torch.zeros(2, COPIED_BYTES // 4).unbind()
    bytes_per_s = 2 * COPIED_BYTES / seconds(partial(target.copy_, source))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    what = f"{cpu_name()}, {torch.get_num_threads()} threads"
    return Device("cpu", "cpu", memory, flops_per_s, bytes_per_s, f"measured on this machine: {what}")


def seconds(action: Callable[[], object]) -> float:
    action()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return median(taken)
