"""What keeps the load of experts even.

Nothing in routing does, so the loss of a model gets a term for it (Fedus et al., 2021, "Switch Transformers", equations
4 to 6):

    coefficient * experts * sum over experts of (share of the tokens that it got) * (mean of its scores)

The shares are those of the global batch: each rank counts, and one small all-reduce behind forward adds the counts up.
With several micro-batches a step, the first backward pass needs the counts of the last forward pass. So all forward
passes run once more before, without a graph, to count: a step of 3 units of compute takes 4.

Shares have no gradient. Scores have, on their own rank: the mean over the global batch is a mean over ranks, as that of
the loss is. So the term is the same for any number of ranks.

The gradient is added where a router makes its scores, when backward is there. By then the shares are known, and what
the loss's own gradient is. So it is there too where a block runs under activation checkpointing, without a graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Round:
    """One forward pass of the model, and the backward pass behind it.

    Attributes:
        mask: (tokens,), of those that count; None: all do.
        load: For each layer, how many tokens each expert got, (experts,).
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


class Balance:
    """The load of all experts, and the term of the loss.

    Args:
        coefficient: Of the term; 0: there is none.
        group: The ranks that share the global batch.

    Attributes:
        counts: This forward pass is of a micro-batch of this rank. Otherwise it runs only so that the rank takes part,
            and its tokens are not counted.
    """

    def __init__(self, coefficient: float, group: dist.ProcessGroup) -> None:
        self._coefficient, self._group = coefficient, group
        self.counts = True
        self._round = Round(None)
        self._ahead: list[Tensor] | None = None
        self._total: Tensor | None = None

    @property
    def has_term(self) -> bool:
        return bool(self._coefficient)

    def passes_ahead(self, micro_batches: int) -> int:
        """Forward passes of a step before its first micro-batch: with several, the load of all must be known."""
        return micro_batches if self.has_term and micro_batches > 1 else 0

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Forward passes within this context only count, for all that follow up to `end_step`."""
        self._ahead = []
        yield
        self._total, self._ahead = self._summed(torch.stack(self._ahead).sum(0)), None

    def end_step(self) -> None:
        self.counts, self._total, self._ahead = True, None, None

    def _summed(self, own: Tensor) -> Tensor:
        dist.all_reduce(own, group=self._group)
        return own

    def begin(self, _: nn.Module, __: Any, inputs: dict[str, Any]) -> None:
        """Hook in front of the model. Padding does not count."""
        mask = inputs.get("attention_mask")
        is_padding = isinstance(mask, Tensor) and mask.ndim == 2
        self._round = Round(mask.reshape(-1).float() if is_padding else None)  # type: ignore[union-attr]

    def watched(self, layer: int, scores: Tensor, chosen: Tensor) -> Tensor:
        """`scores`, (tokens, experts), which get the term's gradient in backward. `chosen`: (tokens, k)."""
        this = self._round
        if torch._C._current_graph_task_id() == -1:  # else an activation checkpoint computes the layer again
            kept = torch.ones_like(scores[:, 0]) if this.mask is None else this.mask
            places = kept.unsqueeze(1).expand(chosen.shape).flatten()
            this.load[layer] = torch.zeros_like(scores[0]).scatter_add_(0, chosen.flatten(), places)
            this.scores = this.scores + (scores.detach() * kept.unsqueeze(1)).sum(0)
            this.rows = this.rows + kept.sum()
        return Scored.apply(scores, this) if self._coefficient else scores

    @torch.no_grad()
    def end(self, model: nn.Module, _: Any, output: Any) -> None:
        """Hook behind the model: its loss gets the term while it trains. Collective, if there are a loss and a term."""
        this = self._round
        if not (self._coefficient and model.training) or getattr(output, "loss", None) is None:
            return
        own = torch.stack([*torch.stack(list(this.load.values())).sum(0), torch.as_tensor(this.rows)]).double()
        own *= self.counts
        if self._ahead is not None:
            self._ahead.append(own)
            return
        total = self._summed(own) if self._total is None else self._total
        shares = (total[:-1] / total[-1]).float()
        slope = self._coefficient * len(shares) * shares / this.rows
        with torch.enable_grad():
            output.loss = WithTerm.apply(output.loss, (slope * this.scores).sum(), slope, this)


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
