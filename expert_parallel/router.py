"""Which experts each token gets: those that score best. It is sent to these alone (`dispatch`).

With a capacity, an expert takes of each sequence at most so many times its even share of the tokens, those that come
first. The others are dropped there: to them this expert adds nothing. As the rule is of one sequence, it is the same
for any number of ranks and any batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from expert_parallel.balance import Balance


class Way(NamedTuple):
    """Attributes:
    sigmoid: A score is the sigmoid of a logit over the sum of all, instead of their softmax.
    has_bias: Experts have biases, that `Balance` moves.
    capacity_factor: Of the even share of a sequence's tokens, which an expert takes; None: it takes all.
    """

    sigmoid: bool = False
    has_bias: bool = False
    capacity_factor: float | None = None


class Router(nn.Module):
    """
    Args:
        weight: (experts, features).
        top_k: Experts of a token.
        normalizes: Weights of a token's experts are divided by their sum.
        layer: The number of the layer.
        way: How it scores, whether its experts have biases, and how many tokens they take.
    """

    bias: Tensor

    def __init__(
        self,
        weight: nn.Parameter,
        top_k: int,
        normalizes: bool,
        layer: int,
        balance: Balance,
        way: Way,
    ) -> None:
        super().__init__()
        self.weight, self.top_k, self._normalizes = weight, top_k, normalizes
        self._layer, self._balance, self._way = layer, balance, way
        if way.has_bias:
            self.register_buffer("bias", torch.zeros(len(weight), dtype=torch.float32, device=weight.device))
            balance.biases.append(self.bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of (..., features) the logits, (tokens, experts); weights and numbers of tokens' experts, (tokens, k). The
        number of one that drops the token is that of all experts."""
        logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        scores, now, factor = self._scores(logits), self._balance.round, self._way.capacity_factor
        ranked = scores.detach() + self.bias if self._way.has_bias else scores.detach()
        chosen = ranked.topk(self.top_k).indices
        kept = taken(chosen, len(self.weight), now.shape, now.mask, factor) if factor else None
        weights = self._balance.watched(self._layer, scores, chosen, kept).gather(1, chosen)
        if self._normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen if kept is None else chosen.masked_fill(~kept, len(self.weight))

    def _scores(self, logits: Tensor) -> Tensor:
        """They add up to 1 for each token, (tokens, experts)."""
        if not self._way.sigmoid:
            return logits.softmax(-1, torch.float32)
        scores = logits.float().sigmoid()
        return scores / scores.sum(-1, keepdim=True)


def taken(chosen: Tensor, experts: int, shape: tuple[int, ...], mask: Tensor | None, factor: float) -> Tensor:
    """Which of the choices of tokens the experts take, (tokens, k), of booleans.

    Args:
        chosen: (tokens, k).
        shape: Sequences, and tokens in each.
        mask: (tokens,), of those that are no padding, which takes no place. Default: all.
        factor: An expert takes at most factor x tokens x k / experts of a sequence, rounded up.
    """
    counted = chosen.new_ones(shape) if mask is None else mask.view(shape).to(chosen.dtype)
    places = functional.one_hot(chosen, experts).sum(1).view(*shape, experts) * counted.unsqueeze(-1)
    most = (factor * chosen.shape[1] / experts * counted.sum(1)).ceil()
    return (places.cumsum(1) <= most.view(-1, 1, 1)).view(-1, experts).gather(1, chosen)
