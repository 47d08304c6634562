"""Costs of operators from a device's peak rates."""

from dataclasses import dataclass, replace

from planner.contracts import OperatorCall
from planner.costs import hardware
from planner.costs.cluster import Device
from planner.costs.hardware import Efficiency

CONVOLUTIONS = "aten.convolution"
"""Torch computes these as TF32 by default (`torch.backends.cudnn.allow_tf32`), but not products of matrices."""


@dataclass(frozen=True)
class Roofline:
    """A launch, and the larger of what arithmetic takes and what memory takes (Williams, Waterman and Patterson,
    "Roofline: an insightful visual performance model for multicore architectures", 2009)."""

    device: Device
    efficiency: Efficiency

    def seconds(self, call: OperatorCall) -> float | None:
        """None if the device has no rate for the operator's dtype."""
        if not call.bytes_moved:
            return 0.0
        compute = 0.0
        if call.flops:
            rate = self.rate(call)
            if rate is None:
                return None
            compute = call.flops / (rate * self.efficiency.compute)
        memory = call.bytes_moved / (self.device.bytes_per_s * self.efficiency.memory)
        return self.efficiency.launch_s + max(compute, memory)

    def rate(self, call: OperatorCall) -> float | None:
        rates, dtype = self.device.flops_per_s, call.dtypes[0]
        if dtype == "float32" and call.name.startswith(CONVOLUTIONS):
            return rates.get("tfloat32", rates.get(dtype))
        return rates.get(dtype)


def roofline(device: Device, efficiency: float | None = None) -> Roofline:
    """Costs by peak rates.

    Args:
        efficiency: Part of the peak rates, of both compute and memory, that operators reach. Default: the table's.

    Raises:
        UserError: an efficiency outside its bounds.
    """
    of_table = hardware.efficiency(device)
    if efficiency is not None:
        of_table = replace(of_table, compute=efficiency, memory=efficiency)
    return Roofline(device, of_table)
