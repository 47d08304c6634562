"""Which experts each token gets: those that score best. It is sent to these alone (`dispatch`)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from expert_parallel.balance import LoadBalance


class Router(nn.Module):
    """
    Args:
        weight: (experts, features).
        top_k: Experts of a token.
        normalizes: Weights of a token's experts are divided by their sum.
        layer: The number of the layer.
        sigmoid: A score is the sigmoid of a logit over the sum of all, instead of their softmax.
        has_bias: Experts have biases, that `LoadBalance` moves.
    """

    bias: Tensor

    def __init__(
        self,
        weight: nn.Parameter,
        top_k: int,
        normalizes: bool,
        layer: int,
        balance: LoadBalance,
        sigmoid: bool,
        has_bias: bool,
    ) -> None:
        super().__init__()
        self.weight, self.top_k, self._normalizes = weight, top_k, normalizes
        self._layer, self._balance, self._sigmoid, self._has_bias = layer, balance, sigmoid, has_bias
        if has_bias:
            self.register_buffer("bias", torch.zeros(len(weight), dtype=torch.float32, device=weight.device))
            balance.biases.append(self.bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of (..., features) the logits, (tokens, experts); weights and numbers of tokens' experts, (tokens, k)."""
        logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        scores = self._scores(logits)
        ranked = scores.detach() + self.bias if self._has_bias else scores.detach()
        chosen = ranked.topk(self.top_k).indices
        weights = self._balance.watched(self._layer, scores, chosen).gather(1, chosen)
        if self._normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    def _scores(self, logits: Tensor) -> Tensor:
        """They add up to 1 for each token, (tokens, experts)."""
        if not self._sigmoid:
            return logits.softmax(-1, torch.float32)
        scores = logits.float().sigmoid()
        return scores / scores.sum(-1, keepdim=True)
