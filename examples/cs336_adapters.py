"""Adapters for the tests of course CS336, assignment 2 (docs/own-loop.md): copy to `tests/adapters.py` there.

Those tests make the optimizer, and call something of ours after backward. CHOICE in the environment names the strategy.
"""

import copy
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import ddp_lab


class Adapted(nn.Module):
    def __init__(self, module, choice):
        super().__init__()
        whole = copy.deepcopy(module)  # shows whole gradients
        self.of = ddp_lab.load(os.environ.get("CHOICE", choice))(module, torch.optim.SGD)
        self.module = whole if self.of.shards else module

    def parameters(self, recurse=True):
        shards = (p for group in self.of.optimizer.param_groups for p in group["params"])
        return shards if self.of.shards else super().parameters()

    def forward(self, *inputs):
        self.of.zero_grad()
        self.step = self.of.micro_batch()
        self.step.__enter__()
        return self.of(*inputs)

    def on_after_backward(self, optimizer):
        self.step.__exit__(None, None, None)
        for name, gradient in self.of.full_gradients().items() if self.of.shards else ():
            self.module.get_parameter(name).grad = gradient

    def gather_full_params(self):
        state = [self.of.full_state_dict()]
        dist.broadcast_object_list(state, 0)
        return state[0]


class ShardedOptimizer:
    def __init__(self, params, optimizer_cls, **kwargs):
        self.params = nn.ParameterList(params)
        make_strategy = ddp_lab.load(os.environ.get("CHOICE", "zero1"))
        self.of = make_strategy(self.params, lambda shards: optimizer_cls(shards, **kwargs))
        self.zero_grad = self.of.zero_grad

    def step(self):
        used = {p: p.grad for p in self.params if p.grad is not None}
        self.of.zero_grad()
        with self.of.micro_batch():
            torch.autograd.backward(list(used), list(used.values()))
        self.of.step()
        self.of.finish_parameter_synchronization()


get_ddp = partial(Adapted, choice="bucket_ddp_async")
get_fsdp = lambda module, compute_dtype=None: Adapted(module, "zero3")  # noqa: E731
get_sharded_optimizer = ShardedOptimizer
ddp_on_after_backward = fsdp_on_after_backward = Adapted.on_after_backward
fsdp_gather_full_params = Adapted.gather_full_params
