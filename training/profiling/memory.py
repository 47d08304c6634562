"""How many bytes are held: by tensors and by the process; and how many the formula of a sharding stage expects."""

import resource
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

COMPONENTS = ("parameters", "gradients", "optimizer_state", "buffers")
"""Of model states, in display order; those that can be sharded come first."""


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once however many tensors are views into it."""
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
    """A model before any strategy touches it; tied parameters count once.

    Attributes:
        elements: Elements of all parameters.
        parameter_bytes: Bytes of all parameters.
        trainable_bytes: Bytes of those that train.
    """

    elements: int
    parameter_bytes: int
    trainable_bytes: int

    @classmethod
    def of(cls, module: nn.Module) -> "ModelSize":
        parameters = list(module.parameters())
        return cls(
            elements=sum(p.numel() for p in parameters),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            trainable_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        )


def expected_state_bytes(
    size: ModelSize, world_size: int, shards: Collection[str], optimizer_values: int = 2
) -> dict[str, int]:
    """Bytes a rank that parameters, gradients and optimizer states should take at rest, by component.

    With fp32 parameters (also under autocast, which keeps them) and Adam, in bytes a parameter: 16 replicated, 8 + 8/N
    with the optimizer's states sharded (ZeRO-1), 4 + 12/N with gradients too (ZeRO-2), 16/N with parameters too
    (ZeRO-3). Padding is not in it, nor the step counter that Adam keeps for each tensor.

    Args:
        shards: Those of `COMPONENTS` of which a rank holds 1/N only, rounded up.
        optimizer_values: Values that the optimizer keeps for each trained element; Adam's two moments.
    """
    whole = {
        "parameters": size.parameter_bytes,
        "gradients": size.trainable_bytes,
        "optimizer_state": optimizer_values * size.trainable_bytes,
    }
    return {name: -(-held // world_size) if name in shards else held for name, held in whole.items()}
