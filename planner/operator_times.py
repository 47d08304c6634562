"""Times each operator of a step, as the simulator will see it.

The step runs within a `TorchDispatchMode` below autograd under the profiler, and each operator's time is that of its
own event (on CUDA, of its kernels), without what the mode and Python do around it. What it takes to get from one
operator to the next (Python, autograd, views, on CUDA gaps between kernels) is what is left of the step as it is with
nobody looking, and is laid on the operators of each phase in equal parts.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from planner.calls import is_compute, operator_call
from planner.contracts import OperatorCall
from training.errors import UserError
from training.profiling.stopwatch import Stopwatch

MARK = "planner operator "
PHASES = ("forward", "backward", "optimizer")
WARM_UP, LONG_ENOUGH_S = 3, 5.0
"""Steps before the first that counts, or fewer where they take so many seconds. The first makes optimizer states."""
OnPhase = Callable[[str], None]
Step = Callable[[OnPhase], object]
"""Runs once, and tells when each phase begins."""


class Operators(TorchDispatchMode):
    """Sees each operator, and marks it in a profile by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.seen: list[tuple[OperatorCall, str]] = []

    def on_phase(self, name: str) -> None:
        self.phase = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_compute(func):
            return func(*args, **kwargs)
        number, phase = len(self.seen), self.phase
        with record_function(f"{MARK}{number}"):
            answer = func(*args, **kwargs)
        self.seen.append((operator_call(func, args, kwargs, answer), phase))
        return answer


@dataclass(frozen=True)
class Timed:
    """One operator of a step.

    Attributes:
        seconds: Of itself.
        overhead_s: Of getting to it.
    """

    call: OperatorCall
    phase: str
    seconds: float
    overhead_s: float = 0.0


def operators_of(
    step: Step,
    device: torch.device,
    repeats: int,
    before_each: Callable[[], object] = lambda: None,
) -> list[Timed]:
    """The operators of a step, each with the median of its times.

    Raises:
        UserError: they are not the same every time.
    """
    began = time.perf_counter()
    for _ in range(WARM_UP):
        step(lambda phase: None)
        if time.perf_counter() - began > LONG_ENOUGH_S:
            break
    passes = []
    for _ in range(repeats):
        before_each()
        passes.append(operator_seconds(step, device))
    seen = passes[0][0]
    if any(other != seen for other, _ in passes):
        raise UserError("the step issues other operators each time, so that none can be timed over several steps")
    seconds = [median(values) for values in zip(*(times for _, times in passes), strict=True)]
    return [Timed(call, phase, each) for (call, phase), each in zip(seen, seconds, strict=True)]


def phase_seconds(step: Step, device: torch.device) -> dict[str, float]:
    """What each phase takes without anybody looking."""
    stopwatch, marks = Stopwatch(device), []
    step(lambda phase: marks.append((phase, stopwatch.mark())))
    moments = stopwatch.seconds_since_first([*(moment for _, moment in marks), stopwatch.mark()])
    totals = dict.fromkeys(PHASES, 0.0)
    for (phase, _), begin, end in zip(marks, moments, moments[1:], strict=False):
        totals[phase] += end - begin
    return totals


def operator_seconds(step: Step, device: torch.device) -> tuple[list[tuple[OperatorCall, str]], list[float]]:
    """Each operator with its phase, and the seconds of it alone."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, acc_events=True) as profiler, Operators() as operators:
        step(operators.on_phase)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return operators.seen, seconds_by_number(profiler.events(), len(operators.seen), device.type == "cuda")


def seconds_by_number(events: Iterable[Any], count: int, on_cuda: bool) -> list[float]:
    """Of the operator within each mark: its duration, or that of its kernels and copies.

    Args:
        events: `torch.profiler.profile.events()`. A mark appears on the device's side, too, and holds nothing there.
    """
    seconds = [0.0] * count
    for event in events:
        if event.name.startswith(MARK) and event.device_type == torch.autograd.DeviceType.CPU:
            inner = [each.device_time_total if on_cuda else each.time_range.elapsed_us() for each in event.cpu_children]
            seconds[int(event.name.removeprefix(MARK))] = sum(inner) * 1e-6
    return seconds


def with_overhead(timed: Sequence[Timed], phase_seconds: dict[str, float]) -> list[Timed]:
    """`timed` with costs that add up to what each phase takes: the rest is shared out equally among its operators, and
    what falls on those that touch no element, of which the simulator knows nothing, goes to their next neighbour.

    Where operators alone take longer than their phase, as they may under a profiler, all are shortened alike.
    """
    answer: list[Timed] = []
    for phase, total in phase_seconds.items():
        mine = [each for each in timed if each.phase == phase]
        touching = [index for index, each in enumerate(mine) if each.call.bytes_moved]
        if not touching:
            continue
        busy = sum(mine[index].seconds for index in touching)
        scale, rest = min(1.0, total / busy) if busy else 1.0, max(0.0, total - busy)
        bounds = [-1, *touching[:-1], len(mine) - 1]
        for index, begin, end in zip(touching, bounds, bounds[1:], strict=False):
            share = (end - begin) / len(mine)
            answer.append(replace(mine[index], seconds=mine[index].seconds * scale, overhead_s=rest * share))
    return answer
