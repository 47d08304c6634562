"""Backward in two: gradients of inputs now, gradients of weights later.

The stage before waits for the gradient of a stage's input, and nobody for those of weights. Backward of a product
y = x w is two products: of x, dx = dy w^T, and of w, dw = x^T dy. Here backward makes the first, and notes x and dy for
the second. Biases, norms and embeddings get their gradients at once: they cost little.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class WeightGradients(TorchFunctionMode):
    """Within this context, products with weights leave the weights' gradients for `compute`. One for each micro-batch
    of a stage; enter it around forward, and around backward of gradients of inputs, where blocks may be computed again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._products: dict[Tensor | None, list[tuple[Tensor, Callable[[], Tensor]]]] = {}  # by parameter

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and torch.is_grad_enabled():
            return self._linear(*args, **kwargs)
        if func is torch.addmm and torch.is_grad_enabled() and not kwargs:  # transformers' Conv1D
            bias, rows, weight = args
            return self._linear(rows, weight.t(), bias, leaf=weight)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, leaf: Tensor | None = None) -> Tensor:
        with torch._C.DisableTorchFunction():
            if not weight.requires_grad:
                return functional.linear(input, weight, bias)
            leaf = weight if leaf is None else leaf
            if torch.is_autocast_enabled(input.device.type):
                dtype = torch.get_autocast_dtype(input.device.type)
                input, weight = input.to(dtype), weight.to(dtype)
                bias = None if bias is None else bias.to(dtype)
            leads_on = input.requires_grad
            if not leads_on:
                input = input.detach().requires_grad_()  # so that there is a backward pass
            return Product.apply(input, Weight(weight, leaf), bias, self._products, leads_on)

    def compute(self) -> None:
        """Make the gradients of weights, and let autograd add them to those of earlier micro-batches: weight by weight,
        so that only one gradient takes memory twice, and is still in a cache."""
        while self._products:
            products = self._products.pop(next(iter(self._products)))
            torch.autograd.backward([weight for weight, _ in products], [product() for _, product in products])


class Weight(NamedTuple):
    """A weight that autograd does not see, and the parameter that it is made of."""

    tensor: Tensor
    leaf: Tensor


class Product(torch.autograd.Function):
    """x (..., inputs) times w (outputs, inputs), transposed, plus a bias. To autograd, w is no input: hooks of a weight
    would run without a gradient."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Weight, bias: Tensor | None, products: dict[Any, Any], leads_on: bool
    ) -> Tensor:
        ctx.save_for_backward(input, weight.tensor.detach())
        ctx.products, ctx.weight, ctx.leads_on = products, weight, leads_on
        return functional.linear(input, weight.tensor, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        input, weight = ctx.saved_tensors
        rows, gradients = input.detach().flatten(0, -2), gradient.flatten(0, -2)
        key = ctx.weight.leaf if ctx.weight.leaf.is_leaf else None  # others may come from one computation
        ctx.products.setdefault(key, []).append((ctx.weight.tensor, lambda: gradients.t() @ rows))
        of_bias = gradients.sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight if ctx.leads_on else None, None, of_bias, None, None
