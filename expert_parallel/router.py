"""Which experts each token gets: those that score best. It is sent to these alone (`dispatch`).

With a capacity, an expert takes of each sequence at most so many times its even share of the tokens, those that come
first. The others are dropped there: to them this expert adds nothing. As the rule is of one sequence, it is the same
for any number of ranks and any batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from expert_parallel.balance import Balance


class Router(nn.Module):
    """
    Args:
        weight: (experts, features).
        top_k: Experts of a token.
        normalizes: Weights of a token's experts are divided by their sum.
        layer: The number of the layer.
        capacity_factor: Of the even share; None: nothing is dropped.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        top_k: int,
        normalizes: bool,
        layer: int,
        balance: Balance,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.top_k, self._normalizes = weight, top_k, normalizes
        self._layer, self._balance, self._capacity_factor = layer, balance, capacity_factor

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of (..., features) the logits, (tokens, experts); weights and numbers of tokens' experts, (tokens, k). The
        number of one that drops the token is that of all experts."""
        logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        scores, now = logits.softmax(-1, torch.float32), self._balance.round
        chosen, kept = scores.detach().topk(self.top_k).indices, None
        if self._capacity_factor:
            kept = taken(chosen, len(self.weight), now.shape, now.mask, self._capacity_factor)
        weights = self._balance.watched(self._layer, scores, chosen, kept).gather(1, chosen)
        if self._normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen if kept is None else chosen.masked_fill(~kept, len(self.weight))


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
