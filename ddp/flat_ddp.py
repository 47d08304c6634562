"""One all-reduce for all gradients: flatten them into one tensor, reduce it, copy it back.

A collective costs a latency and a time for its bytes. `simple_ddp_ga` pays the latency once a parameter; here it is
paid once a step (once a dtype, since a tensor has one), for the same 2(N-1)/N * P elements. The price is a copy of all
gradients, there and back, and as much memory again; and the one all-reduce cannot start before the last gradient is
ready, so all of it is exposed.
"""

import torch
import torch.distributed as dist

from training.replicated import ReplicatedStrategy, by_dtype, bytes_of
from training.traffic import Collective


class FlatDDP(ReplicatedStrategy):
    """One blocking all-reduce of all gradients, after the last backward pass of a step."""

    def after_backward(self) -> None:
        if not self.synchronizes_gradients:
            return
        for parameters in by_dtype(self.trainable.values()).values():
            # A parameter without gradient is not used here in this step, but perhaps on another rank.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=self.process_group)
            reduced = flat.split([gradient.numel() for gradient in gradients])
            for parameter, gradient, values in zip(parameters, gradients, reduced, strict=True):
                parameter.grad = gradient.copy_(values.view_as(gradient))

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces([bytes_of(same) for same in by_dtype(self.trainable.values()).values()])
