"""Costs of operators from a record of them (`planner/record.py`)."""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from planner.cluster import Device
from planner.contracts import OperatorCall
from planner.hardware import Efficiency
from planner.interpolation import Point, interpolation
from planner.roofline import Roofline
from training.errors import UserError

SCHEMA_VERSION = 2
LARGE, SMALL = 2**20, 2**14
"""Bytes from which on an operator shows what memory gives, and up to which it shows what any operator takes."""
Item = TypeVar("Item")
Name = TypeVar("Name", bound=Hashable)
Key = tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...]]


@dataclass(frozen=True)
class Entry:
    """One operator of a record: what it does, and what it took. `count`: calls in the step; 0 in a sweep of sizes."""

    call: OperatorCall
    seconds: float
    overhead_s: float
    count: int


class RecordedCosts:
    """An operator takes what it took in the record. Of another shape, it takes what `planner.interpolation` makes of
    those of the same name and dtype; of a name or dtype that is not there, what a roofline says whose rates are those
    that the record reached. The overhead of getting to an operator is that of the same operator, name, or of all.

    Attributes:
        remarks: What a user should know of where these costs come from.
    """

    def __init__(self, entries: Sequence[Entry], device: Device, remarks: tuple[str, ...] = ()) -> None:
        self.remarks = remarks
        self._roofline = attained(entries, device)
        in_step = [entry for entry in entries if entry.count]
        self._overhead_s = mean_overhead(in_step)
        by_name = grouped(in_step, lambda entry: entry.call.name)
        self._overhead_of = {name: mean_overhead(group) for name, group in by_name.items()}
        self._by_key: dict[Key, tuple[float, float]] = {}
        self._points: dict[tuple[str, str], list[Point]] = {}
        for key, group in grouped(entries, lambda entry: key_of(entry.call)).items():
            counted = [entry for entry in group if entry.count]
            seconds = fmean(entry.seconds for entry in counted or group)
            self._by_key[key] = seconds, mean_overhead(counted) if counted else self._overhead_s
            call = group[0].call
            work_s = self._roofline.seconds(call)
            if work_s and seconds:
                point = Point(call.flops, call.bytes_moved, work_s, seconds)
                self._points.setdefault((call.name, main_dtype(call)), []).append(point)
        self._interpolations = {kind: interpolation(points) for kind, points in self._points.items()}

    def seconds(self, call: OperatorCall) -> float | None:
        if not call.bytes_moved:
            return 0.0
        if known := self._by_key.get(key_of(call)):
            return sum(known)
        work = self._roofline.seconds(call)
        if work is None:
            return None
        if others := self._interpolations.get((call.name, main_dtype(call))):
            work = others.seconds(call.flops, call.bytes_moved, work)
        return work + self._overhead_of.get(call.name, self._overhead_s)

    def source_of(self, call: OperatorCall) -> str:
        """Where the answer to `call` comes from: `recorded`, `interpolated`, `roofline`, or `unknown` where there is
        none."""
        if not call.bytes_moved or key_of(call) in self._by_key:
            return "recorded"
        if self._roofline.seconds(call) is None:
            return "unknown"
        return "interpolated" if (call.name, main_dtype(call)) in self._interpolations else "roofline"


def load(path: str | Path) -> dict[str, Any]:
    """A record as it was written.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise UserError(f"cannot read a record of operators from {path}: {reason}") from None
    if not isinstance(content, dict) or content.get("what") != "operators":
        raise UserError(f"{path}: not a record of operators; make one with scripts/plan.py record")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: a record of version {content.get('schema_version')}, this reads version {SCHEMA_VERSION}; "
            "make it again with scripts/plan.py record"
        )
    return content


def stated_error(content: Mapping[str, Any]) -> float:
    """How far the operators' sum misses recorded steps that it was not made from, as a fraction: the worst of them."""
    return max((abs(step["error_pct"]) for step in content["steps"]), default=0.0) / 100


def entries_of(content: Mapping[str, Any]) -> list[Entry]:
    return [
        Entry(
            OperatorCall(
                entry["name"],
                tuple(map(tuple, entry["shapes"])),
                tuple(entry["dtypes"]),
                entry["flops"],
                entry["bytes_moved"],
            ),
            entry["seconds"],
            entry["overhead_s"],
            entry["count"],
        )
        for entry in content["operators"]
    ]


def attained(entries: Sequence[Entry], device: Device) -> Roofline:
    """A roofline of `device` whose rates are those that the record's operators reached, where it has any that show."""
    rates = dict(device.flops_per_s)
    for dtype, group in grouped([e for e in entries if e.call.flops], lambda entry: main_dtype(entry.call)).items():
        rates[dtype] = rate(group, lambda call: call.flops) or rates.get(dtype, 0.0)
    moving = [entry for entry in entries if not entry.call.flops]
    bytes_per_s = rate([entry for entry in moving if entry.call.bytes_moved >= LARGE], lambda call: call.bytes_moved)
    small = [entry.seconds for entry in moving if 0 < entry.call.bytes_moved <= SMALL]
    launch_s = median(small) if small else 0.0
    known = {dtype: of_dtype for dtype, of_dtype in rates.items() if of_dtype and dtype != "tfloat32"}  # in float32's
    reached = replace(device, flops_per_s=known, bytes_per_s=bytes_per_s or device.bytes_per_s)
    return Roofline(reached, Efficiency(1.0, 1.0, launch_s))


def rate(entries: Sequence[Entry], work: Callable[[OperatorCall], int]) -> float | None:
    """Work a second, over all calls of a step, or over a sweep where no step has any."""
    counted = [entry for entry in entries if entry.count]
    weights = [(entry, entry.count) for entry in counted] or [(entry, 1) for entry in entries]
    seconds = sum(entry.seconds * count for entry, count in weights)
    return sum(work(entry.call) * count for entry, count in weights) / seconds if seconds else None


def mean_overhead(entries: Sequence[Entry]) -> float:
    calls = sum(entry.count for entry in entries)
    return sum(entry.overhead_s * entry.count for entry in entries) / calls if calls else 0.0


def device_of(content: Mapping[str, Any]) -> Device:
    return Device(**content["device"])


def key_of(call: OperatorCall) -> Key:
    return call.name, call.shapes, call.dtypes


def main_dtype(call: OperatorCall) -> str:
    """Of the first tensor; of those that read none, nothing."""
    return call.dtypes[0] if call.dtypes else ""


def grouped(items: Iterable[Item], name: Callable[[Item], Name]) -> dict[Name, list[Item]]:
    groups: dict[Name, list[Item]] = {}
    for item in items:
        groups.setdefault(name(item), []).append(item)
    return groups
