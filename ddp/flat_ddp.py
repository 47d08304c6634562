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
            for parameter in parameters:
                if parameter.grad is None:  # not used here in this step, but perhaps on another rank
                    parameter.grad = torch.zeros_like(parameter)
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
            dist.all_reduce(flat, group=self.process_group)
            for parameter, reduced in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad.copy_(reduced.view_as(parameter))

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces([bytes_of(same) for same in by_dtype(self.trainable.values()).values()])
