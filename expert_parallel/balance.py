"""What keeps the load of experts even. Nothing in routing does.

Either the loss of a model gets a term for it (Fedus et al., 2021, "Switch Transformers", equations 4 to 6):

    coefficient * experts * sum over experts of (share of the tokens that it got) * (mean of its scores)

The shares are those of the global batch: each rank counts, and one small all-reduce after forward adds the counts up.
With several micro-batches a step, the first backward pass needs the counts of the last forward pass. So all forward
passes run once more before, without a graph, to count: a step of 3 units of compute takes 4.

Shares have no gradient. Scores have, on their own rank: the mean over the tokens of the global batch is a sum of what
each micro-batch adds. A loss is weighted by its targets, which are not as many as tokens, so the term is divided
by that weight before. So it is the same for any number of ranks and micro-batches, however uneven.

Backward adds the term's gradient at the scores of each router. By then the shares and the loss's gradient are known. So
this also works where a block runs under activation checkpointing, without a graph.

Or each expert has a bias, which has no gradient. Tokens choose by score plus bias, and are weighted by score. After a
step, an expert that got more than the mean of its layer has a bias that is lower by a fixed rate, and one that got less
a higher one (Wang et al., 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts").
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Round:
    """One forward pass of the model, and its backward pass.

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
    def forward(ctx: Any, loss: Tensor, term: Tensor, slope: Tensor, balance_round: Round) -> Tensor:
        ctx.slope, ctx.round = slope, balance_round
        return loss + term

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.round.gradient = gradient * ctx.slope
        return gradient, None, None, None


class Scored(torch.autograd.Function):
    """Returns the scores. Backward adds the term's gradient to theirs."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, balance_round: Round) -> Tensor:
        ctx.round = balance_round
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        term, mask = ctx.round.gradient, ctx.round.mask
        if term is None:  # backward begins at something else than the loss
            return gradient, None
        return gradient + (term if mask is None else mask.unsqueeze(1) * term), None


class LoadBalance:
    """The load of all experts, and the term of the loss.

    Args:
        coefficient: Of the term; 0: there is none.
        bias_rate: By which biases move in a step; 0: there are none.
        group: The ranks that share the global batch.

    Attributes:
        biases: For each layer, (experts,), where there are some.
        weight: See `ddp_lab.strategy.model_parallel.Balance`. None in a loop of the caller's own.
    """

    weight: float | None
    _ahead: list[Tensor] | None
    _total: Tensor | None  # over all ranks and micro-batches of the step, if known ahead
    _local: Tensor | None  # of this rank's micro-batches so far

    def __init__(self, coefficient: float, bias_rate: float, group: dist.ProcessGroup) -> None:
        self._coefficient, self._bias_rate, self._group = coefficient, bias_rate, group
        self.biases: list[Tensor] = []
        self.end_step()

    def passes_ahead(self, micro_batches: int) -> int:
        """Forward passes of a step before its first micro-batch: several micro-batches need the load of all first."""
        return micro_batches if self._coefficient and micro_batches > 1 else 0

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Forward passes within this context only count, for all that follow up to `end_step`."""
        self._ahead = []
        yield
        self._total, self._ahead = self._summed(torch.stack(self._ahead).sum(0)), None

    def load(self) -> Tensor:
        """Of the step that has just run: for each layer, how many tokens of the global batch chose each expert,
        (layers, experts). Moves biases by it. Collective, unless the term has asked for it before."""
        total = self._latest if self._coefficient else self._summed(self._local)  # type: ignore[arg-type]
        load = total[:-1].view(self._layers, -1)
        for bias, of_layer in zip(self.biases, load, strict=False):
            bias.add_((of_layer.mean() - of_layer).sign(), alpha=self._bias_rate)
        return load

    def end_step(self) -> None:
        self.weight = self._ahead = self._total = self._local = None

    def _summed(self, local: Tensor) -> Tensor:
        dist.all_reduce(local, group=self._group)
        return local

    def begin(self, _: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        """Hook before the model. Padding does not count."""
        mask = inputs.get("attention_mask")
        padding = mask.reshape(-1).float() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        self.round = Round(padding)

    def watched(self, layer: int, scores: Tensor, chosen: Tensor) -> Tensor:
        """`scores`, (tokens, experts), which get the term's gradient in backward. `chosen`: (tokens, k)."""
        current = self.round
        if torch._C._current_graph_task_id() == -1:  # else an activation checkpoint computes the layer again
            counted = torch.ones_like(scores[:, :1]) if current.mask is None else current.mask.unsqueeze(1)
            places = counted.expand(chosen.shape)
            load = scores.new_zeros(scores.shape[1]).scatter_add_(0, chosen.flatten(), places.flatten())
            current.load[layer] = load.double()
            current.scores = current.scores + (scores.detach() * counted).sum(0)
            current.rows = current.rows + counted.sum()
        return Scored.apply(scores, current) if self._coefficient else scores

    @torch.no_grad()
    def end(self, model: nn.Module, _: Any, output: Any) -> None:
        """Hook after the model: its loss gets the term while it trains. Collective, if there are a loss and a term."""
        current = self.round
        if not model.training or getattr(output, "loss", None) is None:
            return
        self._layers = len(current.load)
        local = torch.cat([*current.load.values(), torch.as_tensor(current.rows).double().view(1)]) * (self.weight != 0)
        if self._ahead is not None:
            self._ahead.append(local)
            return
        self._local = local if self._local is None else self._local + local
        if not self._coefficient:
            return
        total = self._latest = self._summed(local) if self._total is None else self._total
        shares = (total[:-1].view(self._layers, -1).sum(0) / total[-1]).float()
        rows = total[-1] * self.weight if self.weight else current.rows
        slope = self._coefficient * len(shares) * shares / rows
        with torch.enable_grad():
            output.loss = WithTerm.apply(output.loss, (slope * current.scores).sum(), slope, current)
