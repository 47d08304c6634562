"""Runs steps of a strategy on the pretended device, and says what was seen."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddp
import sharding
from ddp_lab.planner.simulation.process_group import default_group
from ddp_lab.runtime.data.masks import read_no_masks
from ddp_lab.runtime.errors import NonFiniteError
from ddp_lab.runtime.loop import train
from ddp_lab.runtime.mesh import ShardGroups
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.strategy.strategy import Strategy
from ddp_lab.stream_checker.device import Device, pretended_device
from ddp_lab.stream_checker.group import CONFIG, CheckedGroup

RANKS, STEPS = 4, 2
REGISTRIES = (ddp.REGISTRY, sharding.REGISTRY)
Batch = dict[str, Tensor]


@dataclass
class Seen:
    """What a strategy does in a step, mean over `STEPS` of them.

    Attributes:
        races: How often each race was found, in all steps.
        host_waits: By place, how often the host waited for the device, in all steps.
        waits_in_backward: How often a stream waited for a collective in backward, where it could compute.
        stalls: How often a synchronous collective was issued behind others in flight (`Device`).
        copied_bytes: Bytes written by operators that only copy, those of the model among them.
        losses: Of all steps; empty if they are not finite because of a race.
    """

    races: Counter[str] = field(default_factory=Counter)
    host_waits: Counter[str] = field(default_factory=Counter)
    launches: float = 0.0
    collectives: float = 0.0
    waits_in_backward: float = 0.0
    stalls: float = 0.0
    copied_bytes: float = 0.0
    losses: list[float | None] = field(default_factory=list)


def check(
    choice: str,
    make_module: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch],
    micro_batches: int = 1,
    options: StrategyOptions | None = None,
    clip_grad_norm: float | None = None,
    is_late: bool = True,
    shard_size: int | None = None,
    also: Callable[[Strategy], None] = lambda strategy: None,
    made: Callable[[], AbstractContextManager[Strategy]] | None = None,
) -> Seen:
    """Train a few steps of `choice` as rank 0 of `RANKS`, and hold every access to memory against the others.

    Args:
        make_batch: Makes a micro-batch from a seed.
        is_late: Collectives end when they are waited for, and not before. Otherwise they end at once.
        shard_size: Over how many ranks model states are sharded, if not over all (`sharding.options.replicas`).
        also: Something else to do with the strategy, between the first recorded step and the others.
        made: Makes the strategy in another way than over `make_module` on all ranks: in stages of a pipeline.
    """
    read_no_masks()
    device = Device()

    def make_group(name: str) -> CheckedGroup:
        return CheckedGroup(device, range(RANKS), 0, is_late, name)

    def plainly() -> AbstractContextManager[Strategy]:
        registry = next(registry for registry in REGISTRIES if choice in registry.names)
        settings = replace(options or StrategyOptions(), shard_groups=shard_groups(shard_size) if shard_size else None)
        return nullcontext(registry.load(choice)(make_module(), adamw, settings))

    with default_group(make_group, RANKS, CONFIG), pretended_device(device), (made or plainly)() as strategy:
        batches = [make_batch(index) for index in range(micro_batches)]
        step = StepData(RANKS * len(next(iter(batches[0].values()))) * micro_batches, batches)

        def run(steps: int) -> list[float | None]:
            return train(strategy, [step] * steps, clip_grad_norm=clip_grad_norm).loss

        run(max(2, strategy.settling_steps))
        waits = waits_in_backward(strategy, device)
        device.is_recording = True
        try:
            losses = run(1)
            also(strategy)
            losses += run(STEPS - 1)
            strategy.finish_parameter_synchronization()
        except NonFiniteError:  # something was read before it was there
            if not device.memory.races:
                raise
            losses = []
        device.is_recording = False
        return Seen(
            device.memory.races,
            device.waits,
            device.launches / STEPS,
            device.collectives / STEPS,
            sum(waits) / STEPS,
            device.stalls / STEPS,
            device.copied_bytes / STEPS,
            losses,
        )


def shard_groups(size: int) -> ShardGroups:
    """Those of rank 0, where neighbours shard."""
    shard, replicate = dist.new_group(list(range(size))), dist.new_group(list(range(0, RANKS, size)))
    assert isinstance(shard, dist.ProcessGroup) and isinstance(replicate, dist.ProcessGroup), "rank 0 is in both"
    return ShardGroups(shard, replicate)


def waits_in_backward(strategy: Strategy, device: Device) -> list[int]:
    """From now on, how often a stream waited in each backward pass."""
    found: list[int] = []
    forward, after = strategy.forward, strategy.after_backward

    def begin(*args: Any, **kwargs: Any) -> Any:
        answer = forward(*args, **kwargs)
        found.append(-device.collective_waits)
        return answer

    def end() -> None:
        found.append(device.collective_waits)
        after()

    strategy.forward, strategy.after_backward = begin, end  # type: ignore[method-assign]
    return found


def plain_loop(make_module: Callable[[], nn.Module], make_batch: Callable[[int], Batch], micro_batches: int) -> Seen:
    """The same of a loop on one device, for comparison."""
    device = Device()
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
        copied = device.copied_bytes / STEPS
        return Seen(device.memory.races, device.waits, device.launches / STEPS, copied_bytes=copied)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
