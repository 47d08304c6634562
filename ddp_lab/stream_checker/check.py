"""Runs steps of a strategy on the pretended device, and counts races and waits."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.pretended.group import default_group
from ddp_lab.runtime.data.masks import read_no_masks
from ddp_lab.runtime.errors import NonFiniteError
from ddp_lab.runtime.loop import train
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.strategy import Strategy
from ddp_lab.stream_checker.device import CheckedCounts, CheckedDevice, pretended_device
from ddp_lab.stream_checker.group import CONFIG, CheckedGroup

RANKS, STEPS = 4, 2
Batch = dict[str, Tensor]


def check(
    make_strategy: Callable[[], AbstractContextManager[Strategy]],
    make_batch: Callable[[int], Batch],
    micro_batches: int = 1,
    clip_grad_norm: float | None = None,
    is_late: bool = True,
    also: Callable[[Strategy], None] = lambda strategy: None,
) -> CheckedCounts:
    """Train a few steps as rank 0 of `RANKS`, and compare every access to memory with the accesses before it.

    Args:
        make_strategy: Called where all ranks are pretended.
        make_batch: Makes a micro-batch from a seed.
        is_late: Collectives end when they are waited for, and not before. Otherwise they end at once.
        also: Called with the strategy between the first recorded step and the others.
    """
    read_no_masks()
    device = CheckedDevice(is_late)
    with (
        default_group(CheckedGroup, device, RANKS, 0, CONFIG),
        pretended_device(device),
        make_strategy() as strategy,
    ):
        batches = [make_batch(index) for index in range(micro_batches)]
        step = StepData(RANKS * len(next(iter(batches[0].values()))) * micro_batches, batches)

        def run(steps: int) -> list[float | None]:
            return train(strategy, [step] * steps, clip_grad_norm=clip_grad_norm).loss

        run(max(2, strategy.settling_steps))
        device.is_recording = True
        try:
            losses = run(1)
            also(strategy)
            device.counts.losses = losses + run(STEPS - 1)
            strategy.finish_parameter_synchronization()
        except NonFiniteError:  # something was read before it was there
            if not device.counts.races:
                raise
            device.counts.losses = []
        device.is_recording = False
    return device.counts


def plain_loop(
    make_module: Callable[[], nn.Module], make_batch: Callable[[int], Batch], micro_batches: int
) -> CheckedCounts:
    """The counts of a plain training loop on one device, for comparison."""
    device = CheckedDevice()
    with pretended_device(device):
        module = make_module()
        optimizer = adamw(module.parameters())
        batches = [make_batch(index) for index in range(micro_batches)]
        for step in range(2 + STEPS):
            device.is_recording = step >= 2
            optimizer.zero_grad()
            for batch in batches:
                (module(**batch).loss / micro_batches).backward()
            optimizer.step()
    return device.counts


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
