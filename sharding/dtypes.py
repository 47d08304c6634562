"""Mixed precision of sharded parameters: in which dtype the module computes, and in which gradients are reduced.

What FSDP2 has as `MixedPrecisionPolicy(param_dtype, reduce_dtype)`. With `param_dtype` bf16:
- Each rank updates its shard in fp32 (`sharding.flat`). An update is often smaller than half a unit in the last place
  of a bf16 value, which has 8 bits of mantissa, and would be lost.
- Parameters are gathered in bf16: half the bytes. Modules compute in bf16, and so do their inputs: what is fp32 among
  the arguments of the whole module and of each block is cast.
- Gradients are made in bf16, and reduced in `reduce_dtype`, by default fp32, so that a sum over many ranks and
  micro-batches is not rounded at each term.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from training.config import StrategyOptions
from training.precision import DTYPES


class Dtypes(NamedTuple):
    """None is the parameters' own."""

    param: torch.dtype | None
    reduce: torch.dtype | None

    @classmethod
    def of(cls, options: StrategyOptions) -> "Dtypes":
        reduce = options.reduce_dtype or (options.param_dtype and "fp32")
        return cls(*(DTYPES[name] if name else None for name in (options.param_dtype, reduce)))


def cast_inputs(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Cast floating-point arguments of `modules` to `dtype`, as FSDP2 does by default."""

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))

    for module in modules:
        module.register_forward_pre_hook(cast, with_kwargs=True)
