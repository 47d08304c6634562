"""Who watches the collectives of this process, if anyone does (`ddp_lab.runtime.watch.sequence`).

Ranks compare digests of what they have issued (`ddp_lab.strategy.exchange`). Without an observer a digest is 0.
"""

from typing import Protocol

import torch.distributed as dist

from ddp_lab.runtime.errors import SequenceError
from ddp_lab.strategy.gradient_watch import GradientWatch


class Observer(Protocol):
    """Attributes:
    gradients: Tells gradients apart, by the numbers of their parameters.
    """

    gradients: GradientWatch | None

    def digest(self, group: dist.ProcessGroup, /) -> int: ...

    def compare(self, group: dist.ProcessGroup, among: dist.ProcessGroup, /) -> SequenceError | None: ...


_observer: Observer | None = None


def observe(observer: Observer | None) -> None:
    """From now on `observer` watches; None: nobody."""
    global _observer
    _observer = observer


def follow_gradients(watch: GradientWatch) -> None:
    """Tell gradients apart by the numbers that `watch` gives to their parameters."""
    if _observer is not None:
        _observer.gradients = watch


def digest(group: dist.ProcessGroup) -> int:
    """What this rank compares with the others of `group`; 0 if nothing is recorded."""
    return _observer.digest(group) if _observer is not None else 0


def agree_on_sequence(group: dist.ProcessGroup, among: dist.ProcessGroup | None = None) -> SequenceError | None:
    """Compare what each rank has recorded, after digests of `group` differed. Collective.

    Args:
        among: All who have seen that. Default: `group`.

    Returns:
        On every rank, an error that says where the collectives differ; None if no recorded ones do.
    """
    assert _observer is not None, "digests differ, so collectives are recorded"
    return _observer.compare(group, among or group)
