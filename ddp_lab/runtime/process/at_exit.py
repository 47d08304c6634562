"""The end of a process whose loop is not the runner's.

Gloo's threads drop their last tensors a moment after a collective is done, and need the interpreter for it. If Python
is ending by then, the process aborts ("terminate called without an active exception"). A group that is destroyed joins
its threads, but what a script has at module level, such as a strategy, keeps its groups until the very end.
"""

import atexit
import gc
import time
import weakref

import torch.distributed as dist

RELEASE_S = 0.2
"""Seconds within which threads drop what they have finished with."""

_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def settle_at_exit(group: dist.ProcessGroup) -> None:
    """When the process ends, let threads of `group` and of groups made from it finish, if it still exists then."""
    if not _groups:
        atexit.register(_settle)
    _groups.add(group)


def _settle() -> None:
    gc.collect()
    if _groups:
        time.sleep(RELEASE_S)
