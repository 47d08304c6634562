"""Training without fp32 master values: shards in bf16, and updates that are rounded to it at random.

A bf16 value has 8 bits of mantissa, and an update is often smaller than half a unit in the last place. Rounded to
nearest, it is lost each time. Rounded at random, x becomes the value above it with probability (x - below) /
(above - below), and else the value below. Then the expectation of the result is x: of many small updates some are lost,
and others are enlarged, and on average none is (Gupta et al., 2015, "Deep Learning with Limited Numerical Precision";
Zamirai et al., 2020, "Revisiting BFloat16 Training").

A shard takes 2 bytes a parameter instead of 4. Optimizer states stay in fp32. The update runs bucket by bucket:
1. The bucket's shard is copied to fp32.
2. The optimizer updates this copy.
3. The copy is rounded into the shard, and freed.

What is lost is noise: each step moves a weight by up to one unit in the last place too far.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddp.early_updates import only
from ddp_lab.runtime.errors import UnsupportedError
from sharding.parts.flat import FlatParameters

CUT_BITS = 16
"""Of an fp32 pattern; what is above them is the pattern of a bf16 value."""


def round_stochastically(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round fp32 `values` to bf16 so that the expectation of the result is the value.

    A pattern is sign, exponent and mantissa from left to right. So a random number below 2**16 added to it carries into
    the upper half with probability (lower half) / 2**16, and a carry is the next value away from 0. What is not finite
    is kept; above the largest bf16 value comes infinity. Nothing waits for the device.

    Args:
        generator: On the device of `values`.
    """
    noise = torch.randint(2**CUT_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    patterns = noise.add_(values.view(torch.int32)).bitwise_right_shift_(CUT_BITS).bitwise_left_shift_(CUT_BITS)
    rounded = patterns.view(torch.float32).to(torch.bfloat16)  # exact: the lower half is 0
    return torch.where(values.isfinite(), rounded, values.to(torch.bfloat16))


class RoundedUpdate:
    """Updates shards through fp32 copies.

    Random numbers depend on step and rank alone, so that a run can be repeated, and resumed.
    """

    def __init__(self, device: torch.device, rank: int, ranks: int) -> None:
        self._generator, self._rank, self._ranks = torch.Generator(device), rank, ranks

    def begin_step(self, step: int) -> None:
        self._generator.manual_seed(step * self._ranks + self._rank)

    def update(self, optimizer: torch.optim.Optimizer, flat: FlatParameters) -> None:
        """Update the shard of `flat` alone."""
        with only(optimizer, flat.updated.values()), self.of(flat):
            optimizer.step()

    @contextmanager
    def of(self, flat: FlatParameters) -> Iterator[None]:
        """Within this context, `flat.updated` are fp32 values of the shard. At its end they are rounded into it."""
        values = flat.shard.to(flat.update_dtype)
        flat.set_updated_values(values)
        try:
            yield
            flat.shard.copy_(round_stochastically(values, self._generator))
        finally:
            flat.set_updated_values(None)


def require_fp32(parameters: Mapping[str, nn.Parameter]) -> None:
    """Check what `--master-dtype` updates.

    Raises:
        UnsupportedError: names a parameter that is not in fp32.
    """
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise UnsupportedError(
                f"--master-dtype: {name} is {parameter.dtype}, and updates are in fp32: call .float()"
            )
