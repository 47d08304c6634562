"""What a dispatched operator does, in numbers: the same whether its tensors hold data or not.

A record of operators is keyed by these numbers, and the simulator looks times up by them. So both take them from here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ddp_lab.planner.contracts import OperatorCall
from ddp_lab.planner.costs.access import access_of

aten = torch.ops.aten

WITHOUT_BYTES = frozenset(
    {
        aten._unsafe_view,
        aten.lift_fresh,
        aten._reshape_alias,
        aten.empty,
        aten.empty_like,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
        aten.resize_,
        aten.set_,
        aten.is_same_size,
        aten._local_scalar_dense,
    }
)
"""Operators that make or rename a tensor or read its properties, so that no kernel runs over its elements. Views, which
a schema marks as such, are not listed."""
READS_PART = frozenset(
    {aten.embedding, aten.index_select, aten.index, aten.gather, aten.slice_backward, aten.nll_loss_forward}
)
"""Operators that read no more of their first tensor than they write."""

WRITES_ONLY = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"})
"""Names of operators that write a tensor without reading it, with or without `_foreach_` before them. All others that
end in an underscore read it, too."""
ONLY_READ = frozenset({"grads"})
"""Arguments of fused optimizers that a schema calls written. They are written only with a gradient scaler."""

FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    aten._grouped_mm: lambda rows, other, *_, **__: 2 * rows.numel() * other.shape[-1],
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Formulas of torch's counter, and what it lacks: attention's on CPU, and of grouped products (rows of each expert
times its weight; the gradient of that weight)."""

NOT_COMPUTE = frozenset({"prim", "profiler", "c10d", "_c10d_functional"})
"""Namespaces of operators that read properties of tensors, mark a profile, or communicate. A record times the others,
and the simulator charges for them."""


def touches_data(function: torch._ops.OpOverload) -> bool:
    """Whether the operator reads or writes elements."""
    return not function.is_view and function.overloadpacket not in WITHOUT_BYTES


def operator_call(
    function: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> OperatorCall:
    """The numbers of one call of `function`, as `TorchDispatchMode.__torch_dispatch__` sees it after it ran.

    An element that `expand` repeats counts once; a tensor that is both read and written counts twice.

    Args:
        result: Its result. A tensor that is changed in place must be the same object there.
    """
    tensors = tensors_in((*args, *kwargs.values()))
    given = dict(zip((each.name for each in function._schema.arguments), args, strict=False)) | dict(kwargs)
    flops = 0
    if formula := FLOPS.get(function.overloadpacket):
        flops = int(formula(*args, **kwargs, out_val=result))
    return OperatorCall(
        name=str(function),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(dtype_name(tensor.dtype) for tensor in tensors),
        flops=flops,
        bytes_moved=bytes_moved(function, given, tensors, result) if touches_data(function) else 0,
        access=access_of(function, given, tensors, tensors_in((result,))),
    )


def bytes_moved(
    function: torch._ops.OpOverload, given: Mapping[str, Any], tensors: Sequence[Tensor], result: Any
) -> int:
    """`given`: arguments by name. `tensors`: those among them."""
    written = tensors_in((result,))
    if function.overloadpacket in READS_PART and tensors:
        produced = sum(map(tensor_bytes, written))
        return produced + min(tensor_bytes(tensors[0]), produced) + sum(map(tensor_bytes, tensors[1:]))
    both = updated(function, given)
    return sum(
        tensor_bytes(tensor) for tensor in {id(tensor): tensor for tensor in (*tensors, *written)}.values()
    ) + sum(map(tensor_bytes, both))


def updated(function: torch._ops.OpOverload, given: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that it reads and then writes."""
    schema = function._schema
    if not schema.is_mutable or schema.name.partition("::")[2].removeprefix("_foreach_") in WRITES_ONLY:
        return []
    names = [
        argument.name
        for argument in schema.arguments
        if argument.alias_info
        and argument.alias_info.is_write
        and not argument.is_out
        and argument.name not in ONLY_READ
    ]
    return tensors_in(given.get(name) for name in names)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among arguments of an operator, and in lists of them, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the elements that lie apart from each other in memory."""
    if 0 not in tensor.stride():
        return tensor.numel() * tensor.element_size()
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()
