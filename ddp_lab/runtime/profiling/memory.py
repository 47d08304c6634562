"""How many bytes tensors and the process hold, and how many the formula of a sharding stage expects."""

import resource
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

COMPONENTS = ("parameters", "gradients", "optimizer_state", "buffers")
"""Of model states, in display order. Those that can be sharded come first."""


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`. Each counts once, even if several tensors are views into it."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[(tensor.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far, in bytes (`getrusage(2)`, which counts KiB on Linux)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class ModelSize:
    """The size of a model, or of this rank's part of it, before a strategy changes it. Tied parameters count once.

    Attributes:
        elements: Elements of all parameters.
        trainable_elements: Elements of the trainable ones.
        parameter_bytes: Bytes of all parameters.
        trainable_bytes: Bytes of the trainable ones.
    """

    elements: int
    trainable_elements: int
    parameter_bytes: int
    trainable_bytes: int

    @classmethod
    def of(cls, module: nn.Module) -> "ModelSize":
        parameters = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
        return cls(
            elements=sum(p.numel() for p in parameters),
            trainable_elements=sum(p.numel() for p in parameters if p.requires_grad),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            trainable_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        )


def expected_state_bytes(
    size: ModelSize, world_size: int, shards: Collection[str], optimizer_values: int = 2
) -> dict[str, int]:
    """Bytes that parameters, gradients and optimizer states should take on a rank at rest, by component.

    With fp32 parameters (autocast keeps them) and Adam, in bytes per parameter: 16 replicated; 8 + 8/N with optimizer
    states sharded (ZeRO-1); 4 + 12/N with gradients sharded too (ZeRO-2); 16/N with parameters sharded too (ZeRO-3).
    This leaves out padding, and the step counter that Adam keeps for each tensor.

    Args:
        shards: Those of `COMPONENTS` of which a rank holds only 1/N, rounded up.
        optimizer_values: Values that the optimizer keeps for each trainable element; Adam keeps two moments.
    """
    whole = {
        "parameters": size.parameter_bytes,
        "gradients": size.trainable_bytes,
        "optimizer_state": optimizer_values * size.trainable_bytes,
    }
    return {name: -(-held // world_size) if name in shards else held for name, held in whole.items()}
