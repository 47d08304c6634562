"""How long operators take: from a record of them, or from a device's peak rates."""

from dataclasses import dataclass, replace

from planner.cluster import Device
from planner.contracts import OperatorCall, OperatorCosts
from planner.hardware import Efficiency
from planner.hardware import efficiency as assumed_efficiency
from training.errors import UserError

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Roofline:
    """The larger of what arithmetic takes and what memory takes (Williams, Waterman and Patterson, "Roofline: an
    insightful visual performance model for multicore architectures", 2009), and a launch.

    Attributes:
        tensor_float: Whether products of float32 matrices are computed as TF32, where the device can.
    """

    device: Device
    efficiency: Efficiency
    tensor_float: bool = False

    def seconds(self, call: OperatorCall) -> float | None:
        """None where the device has no rate for the operator's dtype."""
        if not call.bytes_moved:
            return self.efficiency.view_s
        compute = 0.0
        if call.flops:
            rate = self.rate(call.dtypes[0])
            if rate is None:
                return None
            compute = call.flops / (rate * self.efficiency.compute)
        memory = call.bytes_moved / (self.device.bytes_per_s * self.efficiency.memory)
        return self.efficiency.launch_s + max(compute, memory)

    def rate(self, dtype: str) -> float | None:
        rates = self.device.flops_per_s
        if dtype == "float32" and self.tensor_float:
            return rates.get("tfloat32", rates.get(dtype))
        return rates.get(dtype)


def roofline(device: Device, efficiency: Efficiency | float | None = None, precision: str = "fp32") -> OperatorCosts:
    """Costs by peak rates alone.

    Args:
        efficiency: What operators reach; a number stands for both compute and memory. Default: what the table assumes.
        precision: `tf32` computes products of float32 matrices as TF32. Otherwise dtypes alone decide: autocast shows
            in them.

    Raises:
        UserError: an efficiency outside its bounds, or an unknown precision.
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision '{precision}': one of {', '.join(PRECISIONS)}")
    of_table = assumed_efficiency(device)
    if efficiency is None:
        efficiency = of_table
    elif not isinstance(efficiency, Efficiency):
        efficiency = replace(of_table, compute=efficiency, memory=efficiency)
    return Roofline(device, efficiency, precision == "tf32")
