"""What this machine's processor or GPU reaches, measured: no data sheet says it by the thread."""

import os
from collections.abc import Callable
from functools import cache, partial
from statistics import median

import torch

from planner.cluster import Device
from training.profiling.stopwatch import Stopwatch
from training.records.record import cpu_name

SIDE = {"cpu": 1024, "cuda": 8192}
COPIED_BYTES = 64 * 2**20
REPEATS = 5


@cache
def cpu() -> Device:
    """One rank's processor, with as many threads as torch uses now, and all of the machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return measured("cpu", torch.device("cpu"), memory, f"{cpu_name()}, {torch.get_num_threads()} threads")


@cache
def gpu(index: int = 0) -> Device:
    """A GPU of this machine that is not in the table."""
    name = torch.cuda.get_device_name(index)
    return measured(name, torch.device("cuda", index), torch.cuda.mem_get_info(index)[1], name)


def measured(name: str, device: torch.device, memory_bytes: int, what: str) -> Device:
    """With rates of a matrix product and of a copy, the median of five. Takes a fraction of a second."""
    flops_per_s, side = {}, SIDE[device.type]
    for dtype in ("float32", "bfloat16"):
        matrix = torch.ones(side, side, dtype=getattr(torch, dtype), device=device)
        out = torch.empty_like(matrix)
        flops_per_s[dtype] = 2 * side**3 / seconds(device, partial(torch.mm, matrix, matrix, out=out))
    source, target = torch.zeros(2, COPIED_BYTES // 4, device=device).unbind()
    bytes_per_s = 2 * COPIED_BYTES / seconds(device, partial(target.copy_, source))
    return Device(name, device.type, memory_bytes, flops_per_s, bytes_per_s, f"measured on this machine: {what}")


def seconds(device: torch.device, action: Callable[[], object]) -> float:
    """Of a call, the median of five after a first one."""
    action()
    stopwatch, taken = Stopwatch(device), []
    for _ in range(REPEATS):
        marks = [stopwatch.mark()]
        action()
        taken.append(stopwatch.seconds_since_first([*marks, stopwatch.mark()])[1])
    return median(taken)
