"""Which experts each token gets: those that score best. It is sent to these alone (`dispatch`)."""

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
    """

    def __init__(self, weight: nn.Parameter, top_k: int, normalizes: bool, layer: int, balance: Balance) -> None:
        super().__init__()
        self.weight = weight
        self.top_k, self._normalizes, self._layer, self._balance = top_k, normalizes, layer, balance

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of (..., features) the logits, (tokens, experts); weights and numbers of tokens' experts, (tokens, k)."""
        logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        scores = logits.softmax(-1, torch.float32)
        chosen = scores.detach().topk(self.top_k).indices
        weights = self._balance.watched(self._layer, scores, chosen).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) if self._normalizes else weights, chosen
