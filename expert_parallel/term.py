"""How the loss's term for an even load gets its gradient (`balance`).

It is added where a router makes its scores, when backward is there. By then the shares are known, and what the loss's
own gradient is. So it is there too where a block runs under activation checkpointing, without a graph.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Round:
    """One forward pass of the model, and the backward pass behind it.

    Attributes:
        mask: (tokens of all,), of those that count; None: all do.
        load: For each layer, how many tokens chose each expert, (experts,).
        scores: The sum over layers and tokens of what each expert scored, (experts,).
        rows: Tokens of all layers together.
        gradient: Of the term with respect to each token's scores, (experts,), as soon as backward begins.
    """

    def __init__(self, mask: Tensor | None) -> None:
        self.mask = mask
        self.load: dict[int, Tensor] = {}
        self.scores: Tensor | float = 0.0
        self.rows: Tensor | float = 0.0
        self.gradient: Tensor | None = None


class WithTerm(torch.autograd.Function):
    """The loss with the term. Backward tells the routers' scores their share of it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, term: Tensor, slope: Tensor, this: Round) -> Tensor:
        ctx.slope, ctx.this = slope, this
        return loss + term

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.this.gradient = gradient * ctx.slope
        return gradient, None, None, None


class Scored(torch.autograd.Function):
    """Scores, to whose gradient that of the term is added."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, this: Round) -> Tensor:
        ctx.this = this
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        term, mask = ctx.this.gradient, ctx.this.mask
        if term is None:  # backward begins at something else than the loss
            return gradient, None
        return gradient + (term if mask is None else mask.unsqueeze(1) * term), None
