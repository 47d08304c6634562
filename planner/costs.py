"""How long operators take on a device that does nothing else, best known first:

recorded("records/l4.json", device)     as measured; other shapes interpolated, other operators by the rates reached
roofline(device)                        by the peak rates of a table, and what is assumed to be reached of them
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from planner.cluster import Device
from planner.contracts import OperatorCall, OperatorCosts
from planner.hardware import Efficiency
from planner.hardware import efficiency as assumed_efficiency
from planner.recorded import RecordedCosts, device_of, entries_of, load
from planner.roofline import Roofline
from training.errors import UserError
from training.records.record import cpu_name


def roofline(device: Device, efficiency: Efficiency | float | None = None) -> OperatorCosts:
    """Costs by peak rates alone.

    Args:
        efficiency: What operators reach; a number stands for both compute and memory. Default: what the table assumes.

    Raises:
        UserError: an efficiency outside its bounds.
    """
    of_table = assumed_efficiency(device)
    if efficiency is None:
        efficiency = of_table
    elif not isinstance(efficiency, Efficiency):
        efficiency = replace(of_table, compute=efficiency, memory=efficiency)
    return Roofline(device, efficiency)


def recorded(
    path: str | Path, device: Device, precision: str | None = None, rescale: bool = False
) -> "RecordedCosts | Rescaled":
    """Costs by a record of this device (`planner.record`).

    Args:
        precision: Of the steps that are planned; None: whatever the record has.
        rescale: Whether a record from another device or precision may be taken: each time is multiplied by what the
            rooflines of the two devices say of the operator. The answer's `remarks` say so.

    Returns:
        Costs with `remarks`: what a user should know of them, such as that a rank of the plan has fewer threads.

    Raises:
        UserError: the file is no record, or one from another device or precision.
    """
    content = load(path)
    of_record = device_of(content)
    remarks: tuple[str, ...] = ()
    if precision is not None and content["precision"] != precision:
        what = f"{path}: recorded in {content['precision']}, not in {precision}"
        if not rescale:
            raise UserError(f"{what}; record this precision, or have the record rescaled")
        remarks += (f"{what}: operators of other dtypes are reckoned from the rates that the record reached",)
    if device.kind == "cpu" and content["threads"] != threads_of_a_rank():
        remarks += (
            f"{path}: recorded with {content['threads']} threads, but a rank has {threads_of_a_rank()} "
            "(OMP_NUM_THREADS; torchrun sets 1)",
        )
    is_same = of_record.name == device.name and (device.kind != "cpu" or content["hardware"] == cpu_name())
    if is_same:
        return RecordedCosts(entries_of(content), of_record, remarks)
    what = f"{path}: recorded on {content['hardware']}, not on {cpu_name() if device.kind == 'cpu' else device.name}"
    if not rescale:
        raise UserError(f"{what}; record there, or have the record rescaled")
    remarks += (f"{what}: times are multiplied by what rooflines say of the two",)
    return Rescaled(RecordedCosts(entries_of(content), of_record), of_record, device, remarks)


@dataclass(frozen=True)
class Rescaled:
    """Costs of one device as if they were another's."""

    costs: RecordedCosts
    of_record: Device
    device: Device
    remarks: tuple[str, ...]

    def seconds(self, call: OperatorCall) -> float | None:
        known = self.costs.seconds(call)
        there, here = (roofline(each).seconds(call) for each in (self.of_record, self.device))
        if not known or not there or here is None:
            return known if known == 0.0 else here
        return known * here / there


@dataclass(frozen=True)
class Scaled:
    """Each operator takes `factor` times as long."""

    costs: OperatorCosts
    factor: float

    def seconds(self, call: OperatorCall) -> float | None:
        known = self.costs.seconds(call)
        return None if known is None else known * self.factor


def threads_of_a_rank() -> int:
    """What torch takes in a process of `torchrun`, from the same environment."""
    text = os.environ.get("OMP_NUM_THREADS", "1")
    return int(text) if text.isdecimal() else 1
