"""Records how long each operator of one rank's step takes on this device, in a file that `planner.costs` reads.

    step = TrainingStep(module, micro_batches, torch.optim.AdamW(module.parameters(), fused=True))
    write("records/l4.json", record([step], device))

What the simulator charges are the operators that a `TorchDispatchMode` sees. So these are timed, one for one: the step
runs within such a mode under the profiler, and each operator's time is that of its own event (on CUDA, of its kernels),
without what the mode and Python do around it. The same step is timed without mode and profiler, in turn with it. What
is left between the sum of operators and that time is the cost of getting from one operator to the next (Python,
autograd, views, on CUDA gaps between kernels), and is laid on the operators of each phase in equal parts. So costs add
up to the step; by how much they miss the time of steps that were not used for this, the file says.
"""

import datetime
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from planner import hardware
from planner.calls import is_compute, operator_call
from planner.cluster import Device
from planner.contracts import OperatorCall
from planner.recorded import SCHEMA_VERSION
from planner.sweep import sweep
from training.errors import UserError
from training.record import device_name, package_versions, write_json
from training.stopwatch import Stopwatch
from training.strategy import MicroBatch

MARK = "planner operator "
PHASES = ("forward", "backward", "optimizer")
WARM_UP, LONG_ENOUGH_S = 3, 5.0
"""Steps before the first that counts, or fewer where they take so many seconds. The first makes optimizer states."""
OnPhase = Callable[[str], None]


@dataclass(frozen=True)
class TrainingStep:
    """One rank's optimizer step, as strategies make it.

    Args:
        precision: As `training.config.StrategyOptions.precision`.
    """

    module: nn.Module
    micro_batches: Sequence[MicroBatch]
    optimizer: torch.optim.Optimizer
    precision: str = "fp32"

    def __call__(self, on_phase: OnPhase) -> None:
        """Run it; `on_phase` is told when each phase begins."""
        on_phase("forward")
        self.optimizer.zero_grad()
        device_type = next(self.module.parameters()).device.type
        for index, batch in enumerate(self.micro_batches):
            if index:
                on_phase("forward")
            with torch.autocast(device_type, torch.bfloat16, enabled=self.precision == "bf16"):
                loss = self.module(**batch).loss
            on_phase("backward")
            (loss / len(self.micro_batches)).backward()
        on_phase("optimizer")
        self.optimizer.step()


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


def record(
    steps: Sequence[Callable[[OnPhase], object]],
    device: torch.device,
    precision: str = "fp32",
    repeats: int = 7,
    about: str = "",
    with_sweep: bool = True,
) -> dict[str, Any]:
    """Time the operators of these steps, such as of one model with several batch sizes.

    Args:
        repeats: How often each is timed both ways; medians count.
        about: What is trained, for people.
        with_sweep: Whether operators that strategies add are timed over sizes too (`planner/sweep.py`).

    Returns:
        What the file holds: see docs/planner-costs.md.

    Raises:
        UserError: a step does not issue the same operators every time, or fewer than 2 repeats are asked for.
    """
    if repeats < 2:
        raise UserError(f"{repeats} repeats: at least 2, since every other one tests the record")
    operators: list[dict[str, Any]] = []
    checks = []
    for number, step in enumerate(steps):
        timed, check = record_step(step, device, repeats)
        operators += [{"step": number, **entry} for entry in by_operator(timed)]
        checks.append(check)
    if with_sweep:
        entries = by_operator(operators_of(sweep(device), device, repeats))
        operators += [{"step": None, **entry, "count": 0} for entry in entries if entry["bytes_moved"]]
    of_table = this_device(device)
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
        "device": {
            "name": of_table.name,
            "kind": of_table.kind,
            "memory_bytes": of_table.memory_bytes,
            "flops_per_s": of_table.flops_per_s,
            "bytes_per_s": of_table.bytes_per_s,
            "source": of_table.source,
        },
        "steps": checks,
        "operators": operators,
    }


def write(path: str | Path, content: dict[str, Any]) -> None:
    """Raises:
    UserError: it cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    write_json(path, content)


def this_device(device: torch.device) -> Device:
    """As the table has it, or measured."""
    if device.type == "cpu":
        return hardware.device("cpu")
    try:
        return hardware.device(torch.cuda.get_device_name(device))
    except UserError:
        from planner.this_machine import gpu

        return gpu(device.index or 0)


def record_step(
    step: Callable[[OnPhase], object], device: torch.device, repeats: int
) -> tuple[list[Timed], dict[str, float]]:
    """The operators of one step with costs that add up to it, and how well they do."""
    plain: list[dict[str, float]] = []

    def time_phases() -> None:
        step(lambda phase: None)  # after the profiler, whose notes are in the caches and between freed tensors
        plain.extend(phase_seconds(step, device) for _ in range(2))

    timed = operators_of(step, device, repeats, before_each=time_phases)
    operators_s = sum(each.seconds for each in timed)
    used, held_out = plain[::4] + plain[1::4], plain[2::4] + plain[3::4]
    timed = with_overhead(timed, {phase: median(each[phase] for each in used) for phase in PHASES})
    predicted = sum(each.seconds + each.overhead_s for each in timed)
    measured = median(sum(each.values()) for each in held_out)
    return timed, {
        "step_s": median(sum(each.values()) for each in plain),
        "operators_s": operators_s,
        "predicted_s": predicted,
        "held_out_step_s": measured,
        "error_pct": 100 * (predicted / measured - 1),
    }


def operators_of(
    step: Callable[[OnPhase], object],
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


def phase_seconds(step: Callable[[OnPhase], object], device: torch.device) -> dict[str, float]:
    """What each phase takes without anybody looking."""
    stopwatch, marks = Stopwatch(device), []
    step(lambda phase: marks.append((phase, stopwatch.mark())))
    moments = stopwatch.seconds_since_first([*(moment for _, moment in marks), stopwatch.mark()])
    totals = dict.fromkeys(PHASES, 0.0)
    for (phase, _), begin, end in zip(marks, moments, moments[1:], strict=False):
        totals[phase] += end - begin
    return totals


def operator_seconds(
    step: Callable[[OnPhase], object], device: torch.device
) -> tuple[list[tuple[OperatorCall, str]], list[float]]:
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


def by_operator(timed: Sequence[Timed]) -> Iterator[dict[str, Any]]:
    """Operators of the same name, shapes and dtypes as one entry, with the mean of their times."""
    groups: dict[tuple[Any, ...], list[Timed]] = {}
    for each in timed:
        groups.setdefault((each.call.name, each.call.shapes, each.call.dtypes), []).append(each)
    for group in groups.values():
        call = group[0].call
        yield {
            "name": call.name,
            "shapes": [list(shape) for shape in call.shapes],
            "dtypes": list(call.dtypes),
            "flops": call.flops,
            "bytes_moved": call.bytes_moved,
            "count": len(group),
            "seconds": sum(each.seconds for each in group) / len(group),
            "overhead_s": sum(each.overhead_s for each in group) / len(group),
        }
