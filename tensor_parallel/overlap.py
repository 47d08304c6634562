"""Asynchronous tensor parallelism: the products of a region run beside its collectives, piece by piece.

With sequence parallelism the layers cut by columns wait until the tokens of all ranks are here, and the sums behind the
layer cut by rows wait until its product is done. But a product treats each token by itself. So tokens are cut into
pieces:

- Gather, then multiply: all gathers start at once. The products of a piece run as soon as it is here, while the next
  pieces are on their way.
- Multiply, then scatter: the sums of a piece leave as soon as its product is done, while the next one is computed.

Each is the other's backward. The gradients of weights need all tokens and come last: those of columns while sums are
still on their way. If products take longer than transfers, one piece of each collective stays exposed (Wang et al.,
2023, "Overlap communication with dependent computation via decomposition", ASPLOS).

All layers cut by columns behind one gather take part: queries, keys and values, or gate and up. They are computed where
the region begins, and answer when they are called with what it was given. A region that changes its input first still
gets right results, but computes these products twice. Heads that ranks share are computed behind the gather.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddp_lab.strategy.communication.collectives import Pending, all_gather, reduce_scatter
from tensor_parallel.cuts import is_transposed, weight_of
from tensor_parallel.operators import own_part


def gather_multiply(
    own: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup, pieces: int
) -> tuple[Tensor, list[Tensor]]:
    """The tokens of all ranks, (tokens, inputs), and their product with each weight, (inputs, outputs)."""
    whole = own.new_empty(dist.get_world_size(group) * len(own), own.shape[1])
    products = [own.new_empty(len(whole), weight.shape[1]) for weight in weights]
    arriving = []
    for piece, mine in zip(whole.chunk(pieces), own.chunk(pieces), strict=True):
        own_part(piece, group).copy_(mine)
        arriving.append(all_gather(piece.view(-1), group))
    weights = [weight.to(own.dtype) for weight in weights]
    for index, piece in enumerate(whole.chunk(pieces)):
        arriving[index].wait()
        for product, weight in zip(products, weights, strict=True):
            torch.mm(piece, weight, out=product.chunk(pieces)[index])
    return whole, products


def multiply_scatter(
    factors: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup, pieces: int, terms: Tensor | None = None
) -> tuple[Tensor, list[Pending]]:
    """This rank's tokens of the sum over ranks, once what is on its way has come.

    Args:
        factors: (tokens, inputs) and (inputs, outputs); their products are added up.
        terms: Added too, (tokens, outputs).
    """
    weights = [weight.to(inputs.dtype) for inputs, weight in factors]
    rows = terms if terms is not None else factors[0][0]
    outputs = terms.shape[1] if terms is not None else weights[0].shape[1]
    own = rows.new_empty(len(rows) // dist.get_world_size(group), outputs)
    leaving = []
    for index, mine in enumerate(own.chunk(pieces)):
        total: Tensor | None = None if terms is None else terms.chunk(pieces)[index]
        for (inputs, _), weight in zip(factors, weights, strict=True):
            piece = inputs.chunk(pieces)[index]
            total = torch.mm(piece, weight) if total is None else torch.addmm(total, piece, weight)
        assert total is not None, "there are terms or factors"
        leaving.append(reduce_scatter(mine.view(-1), total.contiguous().view(-1), group))
    return own, leaving


def of_weight(inputs: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a weight, with its strides."""
    product = torch.mm(inputs.t(), gradient, out=torch.empty_like(weight, dtype=inputs.dtype))
    return product.to(weight.dtype)


class GatherMultiply(torch.autograd.Function):
    """f of sequence parallelism with the products behind it: `gather_multiply`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup, pieces: int, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.pieces = group, pieces
        whole, products = gather_multiply(own, weights, group, pieces)
        ctx.save_for_backward(whole, *weights)
        return whole, *products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_whole: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        factors = [(g.contiguous(), w.t()) for g, w in zip(gradients, weights, strict=True) if g is not None]
        own: Tensor | None = None
        leaving: list[Pending] = []
        if ctx.needs_input_grad[0]:
            own, leaving = multiply_scatter(factors, ctx.group, ctx.pieces, of_whole)
        of_weights = [
            of_weight(whole, gradient, weight) if gradient is not None and is_wanted else None
            for gradient, weight, is_wanted in zip(gradients, weights, ctx.needs_input_grad[3:], strict=True)
        ]
        for sums in leaving:
            sums.wait()
        return own, None, None, *of_weights


class MultiplyScatter(torch.autograd.Function):
    """g of sequence parallelism with the product in front of it: `multiply_scatter`."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, group: dist.ProcessGroup, pieces: int) -> Tensor:
        ctx.group, ctx.pieces = group, pieces
        ctx.save_for_backward(inputs, weight)
        own, leaving = multiply_scatter([(inputs, weight)], group, pieces)
        for sums in leaving:
            sums.wait()
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        inputs_want, weight_wants, *_ = ctx.needs_input_grad
        whole, products = gather_multiply(gradient, [weight.t()] * inputs_want, ctx.group, ctx.pieces)
        of_inputs = products[0] if inputs_want else None
        return of_inputs, of_weight(inputs, whole, weight) if weight_wants else None, None, None


class Columns:
    """The layers cut by columns behind one gather. What was gathered carries their products until they are called."""

    def __init__(self) -> None:
        self._layers: dict[str, nn.Module] = {}

    def __bool__(self) -> bool:
        return bool(self._layers)

    def add(self, name: str, layer: nn.Module) -> None:
        self._layers[name] = layer
        layer.forward = partial(self._forward, name)

    def weights(self) -> list[Tensor]:
        """(inputs, outputs)."""
        return [by_inputs(layer) for layer in self._layers.values()]

    def carried(self, whole: Tensor, products: Sequence[Tensor]) -> Tensor:
        """`whole`, which now carries the products of it as it is."""
        whole.products = dict(zip(self._layers, products, strict=True)), whole._version  # type: ignore[attr-defined]
        return whole

    def _forward(self, name: str, hidden: Tensor) -> Tensor:
        layer = self._layers[name]
        products, version = cast(tuple[dict[str, Tensor], int], getattr(hidden, "products", ({}, 0)))
        product = products.pop(name, None)
        if product is None or version != hidden._version:  # something else, or tokens are not cut now
            return cast(Tensor, type(layer).forward(layer, hidden))
        bias = layer._parameters["bias"]
        return product if bias is None else product + bias.to(product.dtype)


def by_inputs(layer: nn.Module) -> Tensor:
    """The weight of a linear layer, (inputs, outputs)."""
    return weight_of(layer) if is_transposed(layer) else weight_of(layer).t()
