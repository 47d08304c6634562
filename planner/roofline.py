"""Costs of operators from a device's peak rates."""

from dataclasses import dataclass

from planner.cluster import Device
from planner.contracts import OperatorCall
from planner.hardware import Efficiency

CONVOLUTIONS = "aten.convolution"
"""Torch computes these as TF32 unless told otherwise (`torch.backends.cudnn.allow_tf32`), products of matrices not."""


@dataclass(frozen=True)
class Roofline:
    """The larger of what arithmetic takes and what memory takes (Williams, Waterman and Patterson, "Roofline: an
    insightful visual performance model for multicore architectures", 2009), and a launch."""

    device: Device
    efficiency: Efficiency

    def seconds(self, call: OperatorCall) -> float | None:
        """None where the device has no rate for the operator's dtype."""
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
