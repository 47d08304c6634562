"""The dynamic loss scale of fp16, as `torch.amp.GradScaler` has it (docs/how-it-works/precision.md).

Losses are multiplied by the scale before backward, so that small gradients do not become 0 in fp16, and gradients are
divided by it when they are reduced. A step whose gradients are not finite on some rank changes nothing on any rank, and
the next one has a smaller scale. All of this happens on the device: the host reads nothing.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.options import FP16, StrategyOptions

FIRST_SCALE = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
"""What the scale is multiplied by: after `growth_interval` finite steps in a row, and after one that was not."""


class LossScaler:
    """The scale of one strategy. It is the same on every rank, since all see the same `found_inf`.

    Attributes:
        scale: An fp32 scalar on the device. It stays the same within a step.
        growth_tracker: Finite steps since it last changed, an int32 scalar on the device.
        times: What gradients of this step are multiplied by when they are unscaled: losses were not, for want of room
            in fp16. So the choices that average over ranks compute the same fp16 numbers as those that sum.
    """

    def __init__(self, options: StrategyOptions, device: torch.device) -> None:
        self.scale = torch.full((), options.loss_scale or FIRST_SCALE, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.times = 1
        self._interval = options.growth_interval

    @classmethod
    def of(cls, module: nn.Module, options: StrategyOptions) -> "LossScaler":
        """The one that `options` ask for."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dtype == torch.float16:
                raise UnsupportedError(f"{FP16} trains fp32 parameters, and {name} is fp16: call .float()")
        return cls(options, next(module.parameters()).device)

    def inverse(self) -> Tensor:
        """The factor from gradients of this step's backward to those of the loss: an fp64 scalar on the device."""
        return self.times / self.scale.double()

    def unscale_(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients that are all on the device, or all on the host."""
        if tensors := list(gradients):
            torch._foreach_mul_(tensors, self.inverse().float().to(tensors[0].device))

    def update(self, found_inf: Tensor) -> None:
        """The step is over. `found_inf`: 1.0 if it was skipped, else 0.0 (`Verdict.found_inf`)."""
        torch._amp_update_scale_(self.scale, self.growth_tracker, found_inf, GROWTH, BACKOFF, self._interval)

    def state(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint, by name."""
        return {"scale": self.scale, "growth_tracker": self.growth_tracker}
