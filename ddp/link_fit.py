"""What `bucket_ddp_async` measures in its first steps, from which its buckets are then planned.

Four ordinary optimizer steps are watched. Their all-reduces wait for the end of backward, so communication does not
disturb the moments at which gradients become ready. The first of the four does not count: allocators and caches settle
in it. Then all-reduces of a few sizes are timed. All ranks use the slowest rank's figures, so they make the same plan.

How much communication slows backward down is not measured: in four steps it cannot be told from noise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.bucket_plan import Cost, Timeline
from training.communication.link_model import Piece
from training.profiling.stopwatch import Clock, Stopwatch
from training.replicated import bytes_of

WATCHED_STEPS = 4
SETTLING_STEPS = 1
"""How many of the watched steps do not count."""
PROBE_BYTES = (2**12, 2**22)
IN_FLIGHT, REPEATS = 4, 5
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

    def timeline(self, updates_early: bool) -> tuple[list[nn.Parameter], Timeline]:
        """The parameters in the order in which their gradients become ready, and what to plan for. Collective.

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
        cost, tail = measure_all_reduce(self._group, self._parameters[0].device, self._stopwatch)
        return [self._parameters[index] for index in order], Timeline(
            ready=[ready[index] for index in order],
            payload=[payload[index] for index in order],
            kind=[(self._parameters[index].dtype, self._parameters[index].device) for index in order],
            cost=cost,
            tail=tail,
            update=lambda payload: per_byte * payload,
            longest=LONGEST * max(ready),
            overhead=OVERHEAD * max(ready),
        )

    def _moments(self, marks: dict[int, Any]) -> Tensor:
        """Seconds after the first gradient, (parameters,). A parameter without gradient counts as the last."""
        seconds = dict(zip(marks, self._stopwatch.seconds_since_first(list(marks.values())), strict=True))
        last = max(seconds.values(), default=0.0)
        found = [seconds.get(index, last) for index in range(len(self._parameters))]
        return torch.tensor(found, dtype=torch.float64, device=self._parameters[0].device)


def measure_all_reduce(group: dist.ProcessGroup, device: torch.device, stopwatch: Stopwatch) -> tuple[Cost, Cost]:
    """Seconds for which an all-reduce occupies the link, and how much longer the last one takes. Collective.

    The first is what one more all-reduce adds to others in flight. Both are a latency and a time for each byte
    (Hockney, 1994), fitted to a small size and a large one. Sizes between would fit into the processor's caches, where
    gradients do not lie.
    """
    buffer = torch.zeros(IN_FLIGHT * PROBE_BYTES[-1] // 4, device=device)
    seconds = torch.zeros(2, len(PROBE_BYTES), REPEATS, dtype=torch.float64, device=device)
    for column, size in enumerate(PROBE_BYTES):
        pieces = buffer.split(size // 4)[:IN_FLIGHT]
        for repeat in range(REPEATS):
            seconds[0, column, repeat] = timed(pieces[:1], group, stopwatch)
            seconds[1, column, repeat] = timed(pieces, group, stopwatch)
    slowest = seconds.median(2).values
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    alone, together = slowest.cpu().numpy()
    added = np.maximum(together - alone, 0) / (IN_FLIGHT - 1)
    return straight_line(added), straight_line(np.maximum(alone - added, 0))


def straight_line(seconds: np.ndarray) -> Cost:
    """Through what was measured at the two `PROBE_BYTES`."""
    small, large = PROBE_BYTES
    per_byte = max(float(seconds[1] - seconds[0]), 0.0) / (large - small)
    return Piece(0.0, max(float(seconds[0]) - small * per_byte, 0.0), per_byte).seconds


def timed(pieces: Sequence[Tensor], group: dist.ProcessGroup, stopwatch: Stopwatch) -> float:
    """Seconds from a barrier until all `pieces` are reduced on this rank."""
    dist.barrier(group)
    start = stopwatch.mark()
    works = [dist.all_reduce(piece, group=group, async_op=True) for piece in pieces]
    for work in works:
        if work is not None:
            work.wait()
    return stopwatch.seconds_since_first([start, stopwatch.mark()])[1]
