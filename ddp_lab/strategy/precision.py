"""Dtypes by the names that the command line has for them, autocast over parameters that stay in fp32, and modules that
are in bf16 themselves."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ddp_lab.strategy.blocks import find_blocks
from ddp_lab.strategy.communication.consistency import require_castable
from ddp_lab.strategy.options import BF16_TRUE

DTYPES: dict[str | None, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES |= {BF16_TRUE: torch.bfloat16}
AUTOCAST = ("bf16", "fp16")


def autocast(device_type: str, precision: str) -> torch.autocast:
    """The context in which forward runs.

    Args:
        precision: One of `ddp_lab.strategy.options.PRECISIONS`.
    """
    return torch.autocast(device_type, DTYPES[precision], enabled=precision in AUTOCAST)


def bring_to(module: nn.Module, precision: str) -> None:
    """For `bf16-true`, make the parameters of `module` bf16, and what it and its blocks are called with. Nothing where
    they are. Buffers stay: angles of rotary embeddings are read as positions times frequencies, which bf16 mixes up.

    Raises:
        UnsupportedError: a part of the module takes no parameters of another dtype than its buffers.
    """
    dtype = DTYPES[precision]
    others = [p for p in module.parameters() if p.is_floating_point() and p.dtype != dtype]
    if precision != BF16_TRUE or not others:
        return
    require_castable(module, f"--precision {precision}")
    for parameter in others:
        parameter.data = parameter.data.to(dtype)
    cast_inputs([module, *find_blocks(module)], dtype)


def cast_inputs(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Cast floating-point arguments of `modules` to `dtype`, as FSDP2 does by default."""
    for module in modules:
        module.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)


def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
