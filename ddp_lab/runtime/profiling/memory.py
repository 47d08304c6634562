"""How many bytes the process holds, and the components of model states (`ddp_lab.strategy.accounting` counts them)."""

import resource
import sys

COMPONENTS = ("parameters", "gradients", "optimizer_state", "buffers")
"""Of model states, in display order. Those that can be sharded come first."""


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far, in bytes (`getrusage(2)`, which counts KiB on Linux)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
