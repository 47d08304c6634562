"""Memory over one optimizer step: what each component holds over time, and all allocated bytes.

The step is an extra one, after training and evaluation, so it disturbs no step time and no profile window. Hooks sample
the strategy's own count of its model states: after the forward pass of each module that owns parameters, when the
gradient of its output is ready, when a parameter has its gradient, and around the optimizer. Allocated bytes come from
what the allocators report to `torch.profiler`, which runs during the step.
"""

import bisect
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_lab.runtime.errors import NonFiniteError
from ddp_lab.runtime.loop import PHASES, StepFollower, train
from ddp_lab.runtime.profiling.memory import COMPONENTS, allocations_of, counting_on_all_threads, profiled_events
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.modules import tensors_in
from ddp_lab.strategy.strategy import Strategy

MARK = "memory sample "
MOST_SAMPLES = 400
"""The record keeps about so many samples, all peaks among them, so that its size does not grow with the model."""


def record_step_memory(strategy: Strategy, step: StepData, clip_grad_norm: float | None) -> dict[str, Any] | None:
    """Peaks and timeline (`docs/run-record.md`) of an optimizer step, in bytes and ms; None, on every rank, if a step
    diverges. Collective.

    An unrecorded step on the same batch comes first: it frees the tensors of earlier batches, which the recorded step
    could not tell from its own. If the run was too short for the strategy to settle, more such steps come first.
    """
    before = max(1, strategy.settling_steps - strategy.optimizer_steps)
    recorder = MemoryRecorder(strategy)
    try:
        with counting_on_all_threads():  # already here: the count of a tensor that it did not see made would go wrong
            train(strategy, [step] * before, clip_grad_norm=clip_grad_norm)
            with recorder:
                train(strategy, [step], recorder, clip_grad_norm)
    except NonFiniteError:
        return None
    return recorder.result()


class MemoryRecorder(StepFollower):
    """Follows the training loop over one step."""

    slows_this_step = True

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._device = strategy.device
        self._moments: list[tuple[str, dict[str, int]]] = []
        self._handles: list[Any] = []
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._device_peak = 0
        self._reserved_peak: int | None = None
        self._device_used: int | None = None

    def __enter__(self) -> "MemoryRecorder":
        self._strategy.finish_parameter_synchronization()
        self._strategy.zero_grad()  # the profiler does not report frees of earlier allocations, so free them now
        gc.collect()
        self._at_start = sum(self._strategy.memory_breakdown().values())
        if self._device.type == "cuda":
            self._at_start = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)  # else they are those of the whole process
        self._add_hooks()
        self._profile.start()
        self._sample("start")
        return self

    def step(self) -> None:
        """The optimizer step is done."""
        self._strategy.finish_parameter_synchronization()
        if self._device.type == "cuda":
            self._device_peak = torch.cuda.max_memory_allocated(self._device)
            self._reserved_peak = torch.cuda.max_memory_reserved(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            self._device_used = total - free
        self._sample("end")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind in (None, NonFiniteError):  # after other errors, what is in flight may never end: `profiler.py`
            self._strategy.finish_parameter_synchronization()
            self._profile.stop()
        for handle in self._handles:
            handle.remove()

    def _add_hooks(self) -> None:
        strategy = self._strategy
        for name, module in strategy.module.named_modules():
            if module is strategy.module or any(True for _ in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_hook(self._after_forward(name or "model")))
        for name, leaf in zip(strategy.trainable, strategy.leaves(), strict=True):
            self._handles.append(leaf.register_post_accumulate_grad_hook(self._hook(f"gradient of {name}")))
        if isinstance(strategy.optimizer, torch.optim.Optimizer):
            self._handles.append(strategy.optimizer.register_step_pre_hook(self._hook("before the optimizer")))
            self._handles.append(strategy.optimizer.register_step_post_hook(self._hook("after the optimizer")))

    def _hook(self, where: str) -> Callable[..., None]:
        return lambda *_: self._sample(where)

    def _after_forward(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._sample(name)
            tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if tensors:
                tensors[0].register_hook(self._hook(f"backward of {name}"))

        return hook

    def _sample(self, where: str) -> None:
        with record_function(f"{MARK}{len(self._moments)}"):
            # Makes the allocator report: frees on other threads do not.
            torch.empty(1, dtype=torch.uint8, device=self._device)
            communication = {"communication": self._strategy.communication_bytes()}
            self._moments.append((where, self._strategy.memory_breakdown() | communication))

    def result(self) -> dict[str, Any]:
        """Peaks and timeline of the recorded step."""
        marks: dict[int, tuple[int, int]] = {}
        phases: list[tuple[int, int, str]] = []
        for event in profiled_events(self._profile):
            if event.name.startswith(MARK):
                marks[int(event.name.removeprefix(MARK))] = (event.start_time_ns, event.end_time_ns)
            elif event.name in PHASES:
                phases.append((event.start_time_ns, event.end_time_ns, event.name))
        allocations = allocations_of(self._profile, self._device.type, self._at_start)
        timeline = build_timeline(self._moments, marks, sorted(phases), allocations.tensors)
        peaks = peaks_of(timeline)
        peaks["peak_bytes"] = max(peaks["peak_bytes"], self._device_peak)  # the same, unless a thread is not profiled
        peaks |= {"peak_workspace_bytes": allocations.workspace_peak, "peak_reserved_bytes": self._reserved_peak}
        peaks["device_used_bytes"] = self._device_used
        return {**peaks, "timeline": thinned(timeline)}


def build_timeline(
    moments: Sequence[tuple[str, dict[str, int]]],
    marks: dict[int, tuple[int, int]],
    phases: Sequence[tuple[int, int, str]],
    curve: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Columns with a value for each sample, and the phases of the step. The time that sampling took is subtracted.

    `moments`: where each sample was taken, and what the components held. `marks`: by number of a sample, when it began
    and ended, in ns. `phases`: start (ns), end (ns) and name. `curve`: `Allocations.tensors`.
    """
    order = sorted(marks, key=lambda index: marks[index])
    begin = marks[order[0]][1]
    ends = [marks[index][1] for index in order]
    spent = [0]  # ns that samples before each one took
    for index in order:
        spent.append(spent[-1] + marks[index][1] - marks[index][0])

    def ms(moment: int) -> float:
        return round((moment - begin - spent[bisect.bisect_right(ends, moment)] + spent[1]) / 1e6, 3)

    times = [moment for moment, _ in curve]
    rows, next_point, allocated = [], 1, curve[0][1]
    for index in order:
        where, nbytes = moments[index]
        start, end = (bisect.bisect_right(times, moment) for moment in marks[index])
        highest = max([allocated, *(value for _, value in curve[next_point:start])])
        allocated, next_point = curve[end - 1][1], end
        highest = max(highest, allocated)
        row = {"ms": ms(marks[index][0]) if index != order[0] else 0.0, "where": where}
        row |= {f"{component}_bytes": size for component, size in nbytes.items()}
        rows.append(row | {"allocated_bytes": allocated, "highest_bytes": highest})
    spans = [{"name": name, "start_ms": ms(start), "end_ms": ms(end)} for start, end, name in phases]
    return {name: [row[name] for row in rows] for name in rows[0]} | {"phases": spans}


def model_states(timeline: dict[str, Any]) -> list[int]:
    """Bytes of all components together, for each sample."""
    return [sum(nbytes) for nbytes in zip(*(timeline[f"{component}_bytes"] for component in COMPONENTS), strict=True)]


def peaks_of(timeline: dict[str, Any]) -> dict[str, Any]:
    """The peak of all bytes, with its time and phase; of each component; and of all components together."""
    highest = timeline["highest_bytes"]
    peak = highest.index(max(highest))
    by_component = {f"peak_{component}_bytes": max(timeline[f"{component}_bytes"]) for component in COMPONENTS}
    return {
        **by_component,
        "peak_model_states_bytes": max(model_states(timeline)),
        "peak_bytes": highest[peak],
        "peak_ms": timeline["ms"][peak],
        "peak_phase": phase_at(timeline["phases"], timeline["ms"][peak]),
    }


def phase_at(phases: Sequence[dict[str, Any]], ms: float) -> str:
    """For example `forward`, `backward 2 of 2` if there are several, or `between phases`."""
    for index, phase in enumerate(phases):
        if phase["start_ms"] <= ms <= phase["end_ms"]:
            repeats = [index for index, candidate in enumerate(phases) if candidate["name"] == phase["name"]]
            return phase["name"] + (f" {repeats.index(index) + 1} of {len(repeats)}" if len(repeats) > 1 else "")
    return "between phases"


def thinned(timeline: dict[str, Any], most: int = MOST_SAMPLES) -> dict[str, Any]:
    """About `most` samples: of neighbouring samples the one with the most allocated bytes, and all peaks."""
    highest = timeline["highest_bytes"]
    stride = -(-len(highest) // most)
    columns = {name: values for name, values in timeline.items() if name != "phases"}
    totals = [model_states(timeline), *(values for name, values in columns.items() if name.endswith("_bytes"))]
    indices = {0, len(highest) - 1} | {values.index(max(values)) for values in totals}
    for start in range(0, len(highest), stride):
        indices.add(max(range(start, min(start + stride, len(highest))), key=highest.__getitem__))
    order = sorted(indices)
    result = {name: [values[index] for index in order] for name, values in columns.items()}
    result["highest_bytes"] = [
        max(highest[before + 1 : index + 1]) for before, index in zip([-1, *order[:-1]], order, strict=True)
    ]
    return {**result, "phases": timeline["phases"]}
