"""How many bytes the process holds and may hold, the components of model states (`ddp_lab.strategy.account` counts
them), and what allocators report to `torch.profiler`."""

import ctypes
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from ddp_lab.machine import physical_memory
from ddp_lab.runtime.process.launcher import local_ranks

COMPONENTS = ("parameters", "gradients", "optimizer_state", "buffers")
"""Of model states, in display order. Those that can be sharded come first."""
CGROUP = Path("/sys/fs/cgroup/memory.max")
"""What a container may hold (cgroup v2); `max` is no limit."""


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far, in bytes (`getrusage(2)`, which counts KiB on Linux)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def limit_bytes(device: torch.device) -> int:
    """This rank's part of the memory of its GPU, or of the host or container, which ranks of a node share equally."""
    ranks = local_ranks()
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // -(-ranks // torch.cuda.device_count())
    host = physical_memory()
    try:
        return min(host, int(CGROUP.read_text())) // ranks
    except (OSError, ValueError):
        return host // ranks


# Allocated bytes over time, as the allocators report them to torch.profiler -------------------------------------------


def profiled_events(profiler: profile) -> Iterator[Any]:
    """All events of a profile that has ended, in no particular order."""
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)


FACTORIES = ("aten::empty", "aten::new_empty", "aten::zeros", "aten::resize_")
"""How the names of operators begin that allocate for the operator that calls them."""


@dataclass(frozen=True)
class Allocations:
    """Allocated bytes over time, tensors told apart from workspaces.

    A workspace is what an operator allocates and frees before it ends, such as oneDNN's packed copies of the operands
    of a bf16 product. Which there are depends on the processor. A GPU's allocator has a peak of its own, which holds
    them too, so there they count as tensors, and `workspace_peak` (bytes) is None.

    `tensors`: times (ns) at which the bytes of tensors changed, in order, each with the bytes from then on; the first
    row, at time 0, is what was allocated when the profile began.
    """

    tensors: list[tuple[int, int]]
    workspace_peak: int | None

    @property
    def peak(self) -> int:
        return max(nbytes for _, nbytes in self.tensors)


def allocations_of(profiler: profile, device_type: str = "cpu", at_start: int = 0) -> Allocations:
    """What was allocated during a profile that has ended, with `profile_memory=True`, on CPU `counting_on_all_threads`.
    `at_start`: bytes that were allocated when it began."""
    reports = [event for event in profiled_events(profiler) if event.tag.name == "Allocation"]
    reports = [event for event in reports if event.extra_fields.device.type == device_type]
    reports.sort(key=lambda event: (event.start_time_ns, event.extra_fields.total_allocated))
    tells_apart = device_type == "cpu"
    changes = workspace_changes(reports) if tells_apart else [0] * len(reports)
    rows, workspaces, most = [(0, at_start)], 0, 0
    for event, change in zip(reports, changes, strict=True):
        fields = event.extra_fields
        if len(rows) == 1:
            # An allocator counts from the start of the process, or from the moment when counting was switched on.
            offset = at_start - (fields.total_allocated - fields.alloc_size)
        workspaces += change
        most = max(most, workspaces)
        rows.append((event.start_time_ns, fields.total_allocated + offset - workspaces))
    return Allocations(rows, most if tells_apart else None)


def workspace_changes(reports: Sequence[Any]) -> list[int]:
    """For each report of an allocator, in order, by how many bytes it changes what workspaces take."""
    changes, workspaces = [0] * len(reports), dict[int, int]()
    for index, event in enumerate(reports):
        pointer, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            workspaces[pointer] = index
        elif pointer in workspaces:
            first = workspaces.pop(pointer)
            operator = allocating_operator(reports[first])
            if operator is not None and event.start_time_ns <= operator.end_time_ns:
                changes[first], changes[index] = -size, size
    return changes


def allocating_operator(report: Any) -> Any | None:
    """The operator of torch that asked for the memory; None if it was not one."""
    event = report.parent
    while event is not None and event.name.startswith(FACTORIES):
        event = event.parent
    return event if event is not None and event.name.startswith("aten::") else None


@contextmanager
def counting_on_all_threads() -> Iterator[None]:
    """Within this context torch counts the allocated CPU bytes of every thread.

    Otherwise it counts only threads that the profiler watches. It then misses tensors that a communication thread
    frees, so a few buckets a step would seem never to be freed. Enter it a step before the profiler starts: torch keeps
    a table of addresses, and forgets no tensor of an earlier count that was freed while it did not count. The switch is
    a variable of torch's C library that Python has no name for. If it is not found, the count may be too high.
    """
    name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
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
