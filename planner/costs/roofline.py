"""Costs of operators from the rates that a device reaches."""

from dataclasses import dataclass

from planner.contracts import OperatorCall
from planner.costs.cluster import Device

CONVOLUTIONS = "aten.convolution"
"""Torch computes these as TF32 by default (`torch.backends.cudnn.allow_tf32`), but not products of matrices."""


@dataclass(frozen=True)
class Roofline:
    """A launch, and the larger of what arithmetic takes and what memory takes (Williams, Waterman and Patterson,
    "Roofline: an insightful visual performance model for multicore architectures", 2009)."""

    device: Device

    def seconds(self, call: OperatorCall) -> float | None:
        """None if the device has no rate for the operator's dtype."""
        if not call.bytes_moved:
            return 0.0
        compute = 0.0
        if call.flops:
            rates, dtype = self.device.flops_per_s, call.dtypes[0]
            if dtype == "float32" and call.name.startswith(CONVOLUTIONS) and "tfloat32" in rates:
                dtype = "tfloat32"
            if dtype not in rates:
                return None
            compute = call.flops / rates[dtype]
        return self.device.launch_s + max(compute, call.bytes_moved / self.device.bytes_per_s)
