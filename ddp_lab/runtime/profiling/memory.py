"""How many bytes the process holds and may hold, and the components of model states (`ddp_lab.strategy.account`
counts them)."""

import os
import resource
import sys
from pathlib import Path

import torch

from ddp_lab.machine import physical_memory

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
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // -(-ranks // torch.cuda.device_count())
    host = physical_memory()
    try:
        return min(host, int(CGROUP.read_text())) // ranks
    except (OSError, ValueError):
        return host // ranks
