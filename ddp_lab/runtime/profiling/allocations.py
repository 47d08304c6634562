"""Allocated bytes of tensors over time, from what the allocators report to `torch.profiler`."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile


def profiled_events(profiler: profile) -> Iterator[Any]:
    """All events of a profile that has ended, in no particular order."""
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)


def allocated_bytes(profiler: profile, device_type: str, at_start: int) -> list[tuple[int, int]]:
    """Times (ns) at which the allocated bytes changed, in order, each with the bytes from then on.

    Args:
        profiler: Has ended. It had `profile_memory=True`, and on CPU it ran within `counting_on_all_threads`.
        at_start: Bytes that were allocated when it began. They are the first row, at time 0.
    """
    reports = sorted(
        (event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size)
        for event in profiled_events(profiler)
        if event.tag.name == "Allocation" and event.extra_fields.device.type == device_type
    )
    if not reports:
        return [(0, at_start)]
    # An allocator counts from the start of the process, or from the moment when counting was switched on.
    offset = at_start - (reports[0][1] - reports[0][2])
    return [(0, at_start), *((moment, total + offset) for moment, total, _ in reports)]


def peak_of_allocations(profiler: profile, device_type: str = "cpu") -> int:
    """The most bytes that were allocated at one time, beyond those allocated at the start."""
    return max(held for _, held in allocated_bytes(profiler, device_type, at_start=0))


@contextmanager
def counting_on_all_threads() -> Iterator[None]:
    """Within this context torch counts the allocated CPU bytes of every thread.

    Otherwise it counts only threads that the profiler watches. It then misses tensors that a communication thread
    frees, so a few buckets a step would seem never to be freed. Enter it a step before the profiler starts: torch keeps
    a table of addresses, and forgets no tensor of an earlier count that was freed while it did not count. The switch is
    a variable of torch's C library that Python has no name for. If it is not found, the count may be too high.
    """
    name = {"darwin": "libc10.dylib", "win32": "c10.dll"}.get(sys.platform, "libc10.so")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        switch = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    except (OSError, ValueError):
        yield
        return
    before, switch.value = switch.value, True
    try:
        yield
    finally:
        switch.value = before
