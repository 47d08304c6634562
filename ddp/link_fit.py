"""What `bucket_ddp_async` measures in its first steps, from which its buckets are then planned.

Four ordinary optimizer steps are watched. Their all-reduces wait for the end of backward, so communication does not
disturb the moments at which gradients become ready. The first of the four does not count: allocators and caches settle
in it. Then all-reduces of two sizes are timed. All ranks use the slowest rank's figures, so they make the same plan.

The large one must take much longer than it takes to issue one, or the link's rate does not show. On a slow link some
hundred kilobytes do; NVLink needs hundreds of megabytes. So its size grows until it takes `LEAST_RATIO` times as long
as the small one. Where it never does, nothing is fitted.

How much communication slows backward down is not measured: in four steps it cannot be told from noise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.bucket_plan import Cost, Timeline
from ddp_lab.runtime.link.link_model import LinkModel
from ddp_lab.runtime.profiling.stopwatch import Clock, Stopwatch
from ddp_lab.strategy.replicated import bytes_of

WATCHED_STEPS = 4
SETTLING_STEPS = 1
"""How many of the watched steps do not count."""
SMALL_BYTES, LARGE_BYTES = 2**12, (2**18, 2**20, 2**22, 2**24, 2**26, 2**28)
"""Sizes of the all-reduces that are timed: the small one, and those that the large one may have."""
LEAST_RATIO = 20
IN_FLIGHT, REPEATS = 4, 5
MOST_S = 2.0
"""A size is timed less often if `REPEATS` would take longer."""
OVERHEAD = 0.01
"""The share of backward that a bucket must save: each bucket costs thread wake-ups, and measurements are not exact."""
LONGEST = 0.3
"""The share of backward for which a bucket may occupy the link."""


class LinkFit:
    """Watches the first steps of a strategy.

    Args:
        parameters: The trainable ones, in an order that is the same on all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, clock: Clock) -> None:
        self._parameters, self._group = list(parameters), group
        self._place: dict[Tensor, int] = {parameter: index for index, parameter in enumerate(self._parameters)}
        self._stopwatch = Stopwatch(self._parameters[0].device, clock)
        self._marks: list[dict[int, Any]] = []
        self._updates: list[list[Any]] = []

    def begin_step(self) -> None:
        self._marks.append({})

    @property
    def is_due(self) -> bool:
        """Whether enough steps have been watched."""
        return len(self._marks) == WATCHED_STEPS

    def on_gradient(self, parameter: Tensor) -> None:
        """The gradient of `parameter` is ready, in the last micro-batch of a step."""
        self._marks[-1][self._place[parameter]] = self._stopwatch.mark()

    def time_update(self, step: Callable[[], None]) -> None:
        """Make an optimizer step, and time it."""
        marks = [self._stopwatch.mark()]
        step()
        self._updates.append([*marks, self._stopwatch.mark()])

    def timeline(self, updates_early: bool) -> tuple[list[nn.Parameter], Timeline, bool]:
        """The parameters in the order in which their gradients become ready, what to plan for, and whether the link's
        rate is known. Collective.

        Args:
            updates_early: Whether parameters will be updated bucket by bucket.
        """
        ready_in_steps = torch.stack([self._moments(marks) for marks in self._marks[SETTLING_STEPS:]])
        update = [self._stopwatch.seconds_since_first(marks)[1] for marks in self._updates[SETTLING_STEPS:]]
        measured = torch.cat([ready_in_steps.median(0).values, ready_in_steps.new_tensor([min(update, default=0.0)])])
        dist.all_reduce(measured, dist.ReduceOp.MAX, self._group)
        *ready, update_s = measured.tolist()
        order = sorted(range(len(ready)), key=lambda index: (ready[index], -index))
        payload = [bytes_of([parameter]) for parameter in self._parameters]
        per_byte = update_s / max(sum(payload), 1) if updates_early else 0.0
        cost, tail, is_known = measure_all_reduce(self._group, self._parameters[0].device, self._stopwatch)
        timeline = Timeline(
            ready=[ready[index] for index in order],
            payload=[payload[index] for index in order],
            kind=[(self._parameters[index].dtype, self._parameters[index].device) for index in order],
            cost=cost,
            tail=tail,
            update=lambda payload: per_byte * payload,
            longest=LONGEST * max(ready),
            overhead=OVERHEAD * max(ready),
        )
        return [self._parameters[index] for index in order], timeline, is_known

    def _moments(self, marks: dict[int, Any]) -> Tensor:
        """Seconds after the first gradient, (parameters,). A parameter without gradient counts as the last."""
        seconds = dict(zip(marks, self._stopwatch.seconds_since_first(list(marks.values())), strict=True))
        last = max(seconds.values(), default=0.0)
        found = [seconds.get(index, last) for index in range(len(self._parameters))]
        return torch.tensor(found, dtype=torch.float64, device=self._parameters[0].device)


def measure_all_reduce(group: dist.ProcessGroup, device: torch.device, stopwatch: Stopwatch) -> tuple[Cost, Cost, bool]:
    """Seconds for which an all-reduce occupies the link, how much longer the last one takes, and whether the time of a
    byte could be told from the time of a call. Collective.

    The first is what one more all-reduce adds to others in flight. Both are a latency and a time for each byte
    (Hockney, 1994), fitted to a small size and a large one.
    """
    small = time_size(SMALL_BYTES, group, device, stopwatch)
    for size in LARGE_BYTES:
        large = time_size(size, group, device, stopwatch)
        is_known = large[0] >= LEAST_RATIO * small[0]
        if is_known:
            break
    alone, together = np.array([small, large]).T
    added = np.maximum(together - alone, 0) / (IN_FLIGHT - 1)
    sizes = (SMALL_BYTES, size)
    return straight_line(added, sizes), straight_line(np.maximum(alone - added, 0), sizes), is_known


def time_size(size: int, group: dist.ProcessGroup, device: torch.device, stopwatch: Stopwatch) -> tuple[float, float]:
    """Seconds that one all-reduce of `size` bytes takes, and `IN_FLIGHT` of them: medians of the slowest rank.

    The first call of a size does not count: it may set up what later ones use.
    """
    if device.type == "cuda":  # one after the other on a stream of their own: they need no memory each
        pieces: Sequence[Tensor] = [torch.zeros(size // 4, device=device)] * IN_FLIGHT
    else:
        pieces = torch.zeros(IN_FLIGHT * size // 4, device=device).split(size // 4)
    seconds = torch.zeros(2, REPEATS, dtype=torch.float64, device=device)
    first = seconds.new_tensor(timed(pieces, group, stopwatch))
    dist.all_reduce(first, dist.ReduceOp.MAX, group)
    repeats = max(1, min(REPEATS, int(MOST_S / max(first.item(), 1e-9))))  # the same on all ranks
    for repeat in range(repeats):
        seconds[0, repeat] = timed(pieces[:1], group, stopwatch)
        seconds[1, repeat] = timed(pieces, group, stopwatch)
    slowest = seconds[:, :repeats].median(1).values
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    alone, together = slowest.tolist()
    return alone, together


def straight_line(seconds: np.ndarray, sizes: tuple[int, int]) -> Cost:
    """Through what was measured at two `sizes` in bytes."""
    small, large = sizes
    per_byte = max(float(seconds[1] - seconds[0]), 0.0) / (large - small)
    return LinkModel(max(float(seconds[0]) - small * per_byte, 0.0), per_byte).seconds


def timed(pieces: Sequence[Tensor], group: dist.ProcessGroup, stopwatch: Stopwatch) -> float:
    """Seconds until all `pieces` are reduced on this rank, from a moment that all ranks' devices share."""
    dist.all_reduce(torch.zeros(1, device=pieces[0].device), group=group)
    start = stopwatch.mark()
    works = [dist.all_reduce(piece, group=group, async_op=True) for piece in pieces]
    for work in works:
        if work is not None:
            work.wait()
    return stopwatch.seconds_since_first([start, stopwatch.mark()])[1]
