"""One all-reduce for all gradients: flatten them into one tensor, reduce it, copy it back.

A collective costs a latency and a time for its bytes. `simple_ddp_ga` pays the latency once a parameter; here it is
paid once a step (once a dtype, since a tensor has one), for the same 2(N-1)/N * P elements. The price is a copy of all
gradients, there and back, and as much memory again; and the one all-reduce cannot start before the last gradient is
ready, so all of it is exposed.
"""

from itertools import chain

import torch

from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.replicated import ReplicatedStrategy, by_dtype


class FlatDDP(ReplicatedStrategy):
    """One blocking all-reduce of all gradients, after the last backward pass of a step."""

    def after_backward(self) -> None:
        if not self.steps.reduces_now:
            return
        for parameters in by_dtype(self.trainable.values()).values():
            # A parameter without gradient is not used here in this step, but perhaps on another rank.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            pieces = flat.split([gradient.numel() for gradient in gradients])
            views = [piece.view_as(gradient) for piece, gradient in zip(pieces, gradients, strict=True)]
            self.all_reduce(flat)
            for parameter, gradient, reduced in zip(parameters, gradients, views, strict=True):
                parameter.grad = gradient.copy_(reduced)

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        gradients = by_dtype(self.trainable.values()).values()
        return self.gradient_all_reduces(chain(*gradients), calls=[of_dtype[0] for of_dtype in gradients])
