"""Experts over pretended ranks. Nobody routes, so every expert gets equally many tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from expert_parallel import dispatch, experts


@contextmanager
def evenly_routed(is_cuda: bool, on_wait: Callable[[], object]) -> Iterator[None]:
    """Within this context ranks send equally many rows to each expert, and none is dropped.

    Args:
        is_cuda: The device is a GPU, where one kernel multiplies the rows of all experts.
        on_wait: Called where the host waits for the device.
    """

    def even(both: Tensor, rows: int) -> list[list[list[int]]]:
        on_wait()
        _, ranks, own = both.shape
        counts = evenly(rows, ranks * own)
        by_rank = [counts[first : first + own] for first in range(0, ranks * own, own)]
        return [by_rank, by_rank]  # as many rows come as go

    with (
        mock.patch.object(dispatch, "on_host", even),
        mock.patch.object(experts, "has_kernel", lambda _: is_cuda),
    ):
        yield


def evenly(rows: int, experts: int) -> list[int]:
    """Rows of each expert. The first ones have one more, where they do not divide."""
    each, more = divmod(rows, experts)
    return [each + (expert < more) for expert in range(experts)]
