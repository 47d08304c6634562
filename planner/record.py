"""Records how long each operator of one rank's step takes on this device, in a file that `planner.costs` reads.

    step = TrainingStep(module, micro_batches, torch.optim.AdamW(module.parameters(), fused=True))
    write("records/l4.json", record([step], device))

The same step is timed with nobody looking, in turn with the timing of its operators. Costs add up to the half of these
times; by how much they miss the other half, which was not used for them, the file says.
"""

import datetime
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from planner import hardware
from planner.cluster import Device
from planner.operator_times import PHASES, OnPhase, Step, Timed, operators_of, phase_seconds, with_overhead
from planner.recorded import SCHEMA_VERSION
from planner.sweep import sweep
from training.errors import UserError
from training.records.record import device_name, package_versions, write_json
from training.strategy import MicroBatch


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


def record(
    steps: Sequence[Step],
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


def record_step(step: Step, device: torch.device, repeats: int) -> tuple[list[Timed], dict[str, float]]:
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
