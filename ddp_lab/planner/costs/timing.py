"""Times each operator of a training step, as the simulator will see it, and makes a record of them.

    step = TrainingStep(module, micro_batches, torch.optim.AdamW(module.parameters(), fused=True))
    content = measure([step], device)

The step runs within a `TorchDispatchMode` below autograd under the profiler, and each operator gets the duration of its
own event (on CUDA, of its kernels), without what the mode and Python do around it. The same step is also timed without
them. The difference is the way from one operator to the next: Python, autograd, views, on CUDA gaps between kernels.
Each operator gets an equal part of it, so that the times of a record add up to the step.
"""

import datetime
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_lab.planner.contracts import OperatorCall
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.calls import NOT_COMPUTE, operator_call
from ddp_lab.planner.costs.record import SCHEMA_VERSION, key_of
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.records.record import device_name, package_versions
from ddp_lab.strategy.batches import MicroBatch
from ddp_lab.strategy.precision import autocast

MARK = "planner operator "
WARM_UP = 2
"""Steps before the first that counts. The first makes optimizer states."""
Step = Callable[[], object]


def seconds_on(device: torch.device, work: Step) -> float:
    """What `work` takes: on CUDA from one event in the current stream to another, elsewhere by the host's clock."""
    if device.type != "cuda":
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


@dataclass(frozen=True)
class TrainingStep:
    """One rank's optimizer step, as strategies make it.

    Args:
        precision: As `ddp_lab.strategy.options.StrategyOptions.precision`.
    """

    module: nn.Module
    micro_batches: Sequence[MicroBatch]
    optimizer: torch.optim.Optimizer
    precision: str = "fp32"

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        device_type = next(self.module.parameters()).device.type
        for batch in self.micro_batches:
            with autocast(device_type, self.precision):
                loss = self.module(**batch).loss
            (loss / len(self.micro_batches)).backward()
        self.optimizer.step()


class Operators(TorchDispatchMode):
    """Sees each operator, and marks it in a profile by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[OperatorCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in NOT_COMPUTE:
            return func(*args, **kwargs)
        with record_function(f"{MARK}{len(self.seen)}"):
            answer = func(*args, **kwargs)
        self.seen.append(operator_call(func, args, kwargs, answer))
        return answer


def measure(
    steps: Sequence[Step], device: torch.device, precision: str = "fp32", repeats: int = 7, about: str = ""
) -> dict[str, Any]:
    """Time the operators of these steps, such as those of one model with several batch sizes.

    Args:
        repeats: How often each step is timed both ways, at least 1; medians count.
        about: What is trained, for people.

    Returns:
        What the file holds: see docs/planner-costs.md.

    Raises:
        UserError: a step does not issue the same operators every time, or the table does not have this GPU.
    """
    operators: list[dict[str, Any]] = []
    times = []
    for number, step in enumerate(steps):
        entries, of_step = measure_step(step, device, repeats)
        operators += [{"step": number, **entry} for entry in entries]
        times.append(of_step)
    return {
        "schema_version": SCHEMA_VERSION,
        "what": "operators",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "versions": package_versions(),
        "about": about,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "hardware": device_name(device),
        "device": hardware.device(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu").name,
        "steps": times,
        "operators": operators,
    }


def measure_step(step: Step, device: torch.device, repeats: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The operators of one step, with times that add up to it, and the seconds of the step and of operators alone.

    Raises:
        UserError: the operators are not the same every time.
    """
    for _ in range(WARM_UP):
        step()
    plain, passes = [], []
    for _ in range(repeats):
        step()  # after the profiler, whose notes are in the caches and between freed tensors
        plain.append(seconds_on(device, step))
        passes.append(operator_seconds(step, device))
    calls = passes[0][0]
    if any(other != calls for other, _ in passes):
        raise UserError("the step issues other operators each time, so that none can be timed over several steps")
    seconds = [median(values) for values in zip(*(times for _, times in passes), strict=True)]
    times = {"step_s": median(plain), "operators_s": sum(seconds)}
    return list(with_overhead(calls, seconds, times["step_s"])), times


def operator_seconds(step: Step, device: torch.device) -> tuple[list[OperatorCall], list[float]]:
    """The operators of a step, and the seconds of each alone."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, acc_events=True) as profiler, Operators() as operators:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return operators.seen, seconds_by_number(profiler.events(), len(operators.seen), device.type == "cuda")


def seconds_by_number(events: Iterable[Any], count: int, on_cuda: bool) -> list[float]:
    """Duration of the operator within each mark, or that of its kernels and copies.

    Args:
        events: `torch.profiler.profile.events()`. A mark appears on the device's side, too, and holds nothing there.
    """
    seconds = [0.0] * count
    for event in events:
        if event.name.startswith(MARK) and event.device_type == torch.autograd.DeviceType.CPU:
            inner = [each.device_time_total if on_cuda else each.time_range.elapsed_us() for each in event.cpu_children]
            seconds[int(event.name.removeprefix(MARK))] = sum(inner) * 1e-6
    return seconds


def with_overhead(calls: Sequence[OperatorCall], seconds: Sequence[float], step_s: float) -> Iterator[dict[str, Any]]:
    """Operators of the same name, shapes and dtypes as one entry with the mean of their times, and an equal part of the
    rest of the step. Operators that touch no element are left out, since the simulator does not charge for them.

    Where operators alone take longer than the step, as they may under a profiler, all are shortened by one factor.
    """
    groups: dict[Any, list[tuple[OperatorCall, float]]] = {}
    for call, each in zip(calls, seconds, strict=True):
        if call.bytes_moved:
            groups.setdefault(key_of(call), []).append((call, each))
    busy_s = sum(each for group in groups.values() for _, each in group)
    scale, rest_s = (min(1.0, step_s / busy_s) if busy_s else 1.0), max(0.0, step_s - busy_s)
    number = sum(map(len, groups.values()))
    for group in groups.values():
        call = group[0][0]
        yield {
            **asdict(call),
            "count": len(group),
            "seconds": scale * fmean(each for _, each in group) + rest_s / number,
        }
