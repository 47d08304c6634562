"""How an operator reaches memory, which decides how much of a device's rate it gets.

Torch's element-wise kernels load several elements at once where all tensors have one dense layout. Where one is
broadcast, strided or reduced along a row, a GPU handles one element at a time, however few bytes it has.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

CONTIGUOUS = "contiguous"
"""All large tensors have one dense layout."""
SCATTERED = "scattered"
"""Broadcast, strided, or reduced along a dimension: one element at a time."""
ROWS = "rows"
"""Normalizes rows in one kernel, which reads them more than once."""
DERIVATIVE = "derivative"
"""Of an activation function: more arithmetic than bytes."""
OPTIMIZER = "optimizer"
"""A fused update of many tensors."""
CAUSAL = "causal"
"""Attention to earlier positions alone, which needs half of the arithmetic that torch counts."""
KINDS = (CONTIGUOUS, SCATTERED, ROWS, DERIVATIVE, OPTIMIZER)
"""Those that are timed by memory."""

OF_ROWS = ("native_layer_norm", "_fused_rms_norm", "_log_softmax", "_softmax")
REDUCED = frozenset({"sum", "mean", "amax", "amin", "max", "min", "argmax", "var", "logsumexp", "linalg_vector_norm"})
PIECES = ("_foreach", "embedding", "index", "gather", "nll_loss", "split_with_sizes_copy", "_chunk_cat")
"""What the names begin with of operators on whole rows, on few elements, or on many tensors one after another."""
LONG_RUN = 512
"""Bytes in one piece from which on joining tensors is as fast as copying them."""


def access_of(
    function: torch._ops.OpOverload, given: Mapping[str, Any], tensors: Sequence[Tensor], written: Sequence[Tensor]
) -> str:
    """One of `KINDS`, or `CAUSAL`.

    Args:
        given: Arguments by name.
        tensors: Those among the arguments.
        written: Those in the result.
    """
    name = function._schema.name.partition("::")[2]
    if given.get("is_causal"):
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
        short = min(prod(each.shape[given.get("dim", 0) :]) * each.element_size() for each in tensors)
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
    kept = [(step, size) for size, step in zip(shape, stride, strict=True) if size > 1]
    expected = 1
    for step, size in sorted(kept):
        if step != expected:
            return None
        expected *= size
    return tuple(step for step, _ in kept)
