"""What a dispatched operator does, in numbers: the same whether its tensors hold data or not.

A record of operators is keyed by these numbers, and the simulator looks times up by them. So both take them from here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ddp_lab.planner.contracts import (
    CAUSAL,
    CONTIGUOUS,
    DERIVATIVE,
    OPTIMIZER,
    ROWS,
    SCATTERED,
    OperatorCall,
)

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
    aten._grouped_mm: lambda rows, weight, *_, **__: 2 * rows.numel() * weight.shape[-1],
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Formulas of torch's counter, and what it lacks: attention's on CPU, and of grouped products (rows of each expert
times its weight; the gradient of that weight)."""

OF_ROWS = ("native_layer_norm", "_fused_rms_norm", "_log_softmax", "_softmax")
REDUCED = frozenset({"sum", "mean", "amax", "amin", "max", "min", "argmax", "var", "logsumexp", "linalg_vector_norm"})
PIECES = ("_foreach", "embedding", "index", "gather", "nll_loss", "split_with_sizes_copy", "_chunk_cat")
"""What the names begin with of operators on whole rows, on few elements, or on many tensors one after another."""
LONG_RUN = 512
"""Bytes in one piece from which on joining tensors is as fast as copying them."""

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

    An element that `expand` repeats counts once; a tensor that is both read and written counts twice. `result`: its
    result. A tensor that is changed in place must be the same object there."""
    tensors = tensors_in((*args, *kwargs.values()))
    arguments = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | dict(kwargs)
    flops = 0
    if formula := FLOPS.get(function.overloadpacket):
        flops = int(formula(*args, **kwargs, out_val=result))
    return OperatorCall(
        name=str(function),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(dtype_name(tensor.dtype) for tensor in tensors),
        flops=flops,
        bytes_moved=bytes_moved(function, arguments, tensors, result) if touches_data(function) else 0,
        access=access_of(function, arguments, tensors, tensors_in((result,))),
    )


def bytes_moved(
    function: torch._ops.OpOverload, arguments: Mapping[str, Any], tensors: Sequence[Tensor], result: Any
) -> int:
    """`arguments`: by name. `tensors`: those among them."""
    written = tensors_in((result,))
    if function.overloadpacket in READS_PART and tensors:
        produced = sum(map(tensor_bytes, written))
        return produced + min(tensor_bytes(tensors[0]), produced) + sum(map(tensor_bytes, tensors[1:]))
    rewritten = updated(function, arguments)
    return sum(
        tensor_bytes(tensor) for tensor in {id(tensor): tensor for tensor in (*tensors, *written)}.values()
    ) + sum(map(tensor_bytes, rewritten))


def updated(function: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> list[Tensor]:
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
    return tensors_in(arguments.get(name) for name in names)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among arguments of an operator, and in lists of them, in order."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors


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


# How it reaches memory ------------------------------------------------------------------------------------------------


def access_of(
    function: torch._ops.OpOverload, arguments: Mapping[str, Any], tensors: Sequence[Tensor], written: Sequence[Tensor]
) -> str:
    """One of `ACCESSES`, or `CAUSAL`.

    Torch's element-wise kernels load several elements at once where all tensors have one dense layout. Where one is
    broadcast, strided or reduced along a row, a GPU handles one element at a time, however few bytes it has.
    `arguments`: by name. `tensors`: those among the arguments. `written`: those in the result."""
    name = function._schema.name.partition("::")[2]
    if arguments.get("is_causal"):
        return CAUSAL
    if name.startswith("_fused_ad"):
        return OPTIMIZER
    if name.startswith(OF_ROWS):
        return ROWS
    if name in ("silu_backward", "gelu_backward"):
        return DERIVATIVE
    if name.startswith(PIECES):
        return CONTIGUOUS
    if name in REDUCED:
        return SCATTERED if any(tensor.numel() > 1 for tensor in written) else CONTIGUOUS
    if name == "cat":
        short = min(prod(tensor.shape[arguments.get("dim", 0) :]) * tensor.element_size() for tensor in tensors)
        return SCATTERED if short < LONG_RUN and len(tensors) > 1 else CONTIGUOUS
    return of_layouts([(tuple(tensor.shape), tensor.stride()) for tensor in (*tensors, *written)])


def of_layouts(layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Of an element-wise operator on tensors of these shapes and strides."""
    counts = [prod(shape) for shape, _ in layouts]
    most = max(counts, default=0)
    large = {dense_order(*layout) for layout, count in zip(layouts, counts, strict=True) if count == most}
    is_plain = len(large) == 1 and None not in large and not any(1 < count < most for count in counts)
    return CONTIGUOUS if is_plain else SCATTERED


@cache
def dense_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of dimensions longer than 1, if elements lie side by side; else None."""
    dimensions = [(step, size) for size, step in zip(shape, stride, strict=True) if size > 1]
    expected = 1
    for step, size in sorted(dimensions):
        if step != expected:
            return None
        expected *= size
    return tuple(step for step, _ in dimensions)
