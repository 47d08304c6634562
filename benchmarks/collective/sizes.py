"""Sizes of messages: as a person writes them, as ranges, what memory allows, and what is measured at one size."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of a container's memory, in version 2 and version 1."""


@dataclass(frozen=True)
class Measured:
    """A collective at one size.

    Attributes:
        type_name: Empty for a barrier.
        size: Payload in bytes, by nccl-tests' definition; 0 for a barrier.
        count: Elements, in nccl-tests' sense.
        seconds: Of each timed call, on its slowest rank.
        wrong: Wrong elements over all ranks; None for a barrier.
    """

    collective: str
    type_name: str
    redop: str
    size: int
    count: int
    seconds: Sequence[float]
    wrong: int | None


def parse_size(text: str) -> int:
    """Bytes of `4096`, `1K`, `4M`, `1G` or `1.5MiB`; K, M and G are powers of 1024, as in nccl-tests.

    Raises:
        argparse.ArgumentTypeError: it is not such a size, or not a whole number of bytes above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = float(found[1]) * UNITS[found[2].upper()] if found else 0.0
    if size < 1 or size != int(size):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a size; write bytes, or such as 1K, 4M or 1G (powers of 1024)"
        )
    return int(size)


def size_text(size: float) -> str:
    """`4 MiB` for 4194304; four digits where it is not a whole number of any unit."""
    for unit, unit_bytes in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= unit_bytes:
            return f"{size / unit_bytes:.4g} {unit}"
    return f"{size:.4g} B"


def size_range(least: int, most: int, factor: float) -> list[int]:
    """`least`, `least` x `factor` and so on, up to `most`."""
    sizes, size = [], float(least)
    while size <= most:
        sizes.append(round(size))
        size *= factor
    return sizes


def available_memory() -> int | None:
    """Bytes that processes on this node can still take; None where the system does not say."""
    found = []
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    for limit, used in CGROUPS:
        try:
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such file, or no limit
            continue
    return min(found, default=None)
