"""NVTX ranges: names on the timeline of Nsight Systems. There are none unless the run has `--nsys`.

A phase has the name that it has in a trace of torch.profiler. A collective has the place and kind that it has in the
pages' table of calls: `3 all-reduce, 25 MiB` is the group's fourth call of the step. Its range lasts while the host
issues it; Nsight Systems projects it onto the kernel.
"""

from typing import Protocol

MIB = 2**20


class Marker(Protocol):
    """What `torch.cuda.nvtx` has. Ranges nest within a thread."""

    def range_push(self, name: str, /) -> object: ...

    def range_pop(self) -> object: ...


_marker: Marker | None = None
_step = -1
_places: dict[object, int] = {}


def show_ranges(marker: Marker | None) -> None:
    """From now on, mark ranges by `marker`; None: nowhere."""
    global _marker
    _marker = marker
    _places.clear()


def are_shown() -> bool:
    return _marker is not None


def push(name: str) -> None:
    """Begin a range of this thread."""
    if _marker is not None:
        _marker.range_push(name)


def pop() -> None:
    """End the latest range of this thread."""
    if _marker is not None:
        _marker.range_pop()


def call_name(step: int, queue: object, kind: str, size_bytes: int, group: str = "") -> str:
    """The name of the next collective. Counts it.

    Args:
        queue: What the pages count together: the calls of a group on one kind of device, messages apart.
        size_bytes: The payload by nccl-tests' definition.
        group: Told if it is not the group of all ranks.
    """
    global _step
    if step != _step:
        _step = step
        _places.clear()
    place = _places[queue] = _places.get(queue, -1) + 1
    return f"{place} {kind.replace('_', '-')}, {size_bytes / MIB:.3g} MiB" + (f", {group}" if group else "")
