"""A run's strategy over its model, and its learning rates."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import on_every_rank
from ddp_lab.runtime.mesh import EXPERT, MeshGroups
from ddp_lab.strategy.compilation import require_compiler
from ddp_lab.strategy.model_parallel import ModelParallel
from ddp_lab.strategy.strategy import Strategy

OPTIMIZER = torch.optim.AdamW
Parallelize = Callable[[torch.nn.Module, RunConfig, MeshGroups, torch.device], ModelParallel]
"""Cuts a module in place over `MeshGroups.model`, as the run's settings say."""


def seed_everything(seed: int, rank: int) -> None:
    """Seed torch's generators: the same for the same `rank`, different between ranks."""
    torch.manual_seed(seed * 100_003 + rank)


def prepare_device(config: RunConfig, device: torch.device) -> None:
    """Set how the device computes, and check that it can compile, if it is to. Collective."""
    if config.tf32 and device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    if config.strategy.compile:
        on_every_rank(lambda: require_compiler(device))


def cut_over_ranks(
    config: RunConfig, workload: Workload, ranks: RankContext, load_parallelize: Callable[[str], Parallelize]
) -> ModelParallel | None:
    """Cut the workload's model in place, if the mesh says so. Collective."""
    if ranks.groups is None or (ranks.groups.mesh.model_size == 1 and EXPERT not in ranks.groups.mesh.degrees):
        return None
    workload.model.to(ranks.device)
    return load_parallelize(config.choice)(workload.model, config, ranks.groups, ranks.device)


def build_strategy(
    config: RunConfig,
    workload: Workload,
    ranks: RankContext,
    strategy_class: type[Strategy],
    group: dist.ProcessGroup | None = None,
    model_parallel: ModelParallel | None = None,
) -> Strategy:
    """The strategy over the workload's model. `group`: the ranks that see different samples; default: those of the
    mesh, or all."""
    learning_rate = config.lr or workload.learning_rate
    if model_parallel is not None and model_parallel.pipeline is not None:
        strategy_class = strategy_class.in_stages()
    return strategy_class(
        workload.model.to(ranks.device),
        lambda parameters: OPTIMIZER(parameters, lr=learning_rate, fused=True),
        replace(
            config.strategy,
            model_parallel=model_parallel,
            shard_groups=ranks.groups.shard_groups if ranks.groups else None,
        ),
        group or (ranks.groups.data if ranks.groups else None),
    )


def learning_rates(config: RunConfig, steps: int) -> Callable[[int], float]:
    """The rate by number of the step, from 0: linear warm-up, then constant, or decay to 0 at the end of the run.

    With W warm-up steps and T steps in the whole run, the rate of step k, counted from 0, is `--lr` times

        (k + 1) / W                                 if k < W
        1                                           constant
        1 - p,  with p = (k - W) / (T - W)          linear
        (1 + cos(pi p)) / 2                         cosine (Loshchilov and Hutter, 2017, "SGDR", without restarts)

    It depends on the number of the step alone, so a run that resumes continues with the same rates. p would be 1 at the
    step after the last one: no step has a rate of 0.
    """
    peak, warmup = config.lr, config.warmup_steps
    assert peak is not None, "it is resolved"
    if warmup > steps:
        raise UserError(f"--warmup-steps {warmup}: the run has only {steps} optimizer steps; give at most so many")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / (steps - warmup)
        decayed = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return decayed.get(config.schedule, 1.0)

    return lambda step: peak * factor(step)
