"""What a course asks of data parallelism, by the public names of ddp_lab alone: a wrapped module.

The course is Stanford's CS336, assignment 2 of 2026. Its loops call the module as on one device, and
`after_backward` in between.
"""

from typing import Any

import torch
from torch import nn

import ddp_lab

DTYPES = {None: None, torch.float16: "fp16", torch.bfloat16: "bf16"}


class Wrapped(nn.Module):
    """A forward pass opens the micro-batch, `after_backward` closes it."""

    def __init__(self, choice: str, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.module = module
        options = ddp_lab.StrategyOptions(
            param_dtype=DTYPES[dtype], loss_scale=1.0 if DTYPES[dtype] == "fp16" else None
        )
        self.strategy = ddp_lab.load(choice)(module, lambda params: torch.optim.SGD(params, lr=0.0), options)

    def forward(self, *args: Any) -> Any:
        self.strategy.zero_grad()
        self.micro_batch = self.strategy.micro_batch()
        self.micro_batch.__enter__()
        return self.strategy.scale_loss(self.strategy(*args))

    def after_backward(self, optimizer: torch.optim.Optimizer) -> None:
        self.micro_batch.__exit__(None, None, None)
        self.strategy.optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        optimizer.step = self.strategy.step  # type: ignore[method-assign]
