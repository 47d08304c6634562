"""A run's strategy over its model."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.distributed import Ranks
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
    config: RunConfig, workload: Workload, ranks: Ranks, load_parallelize: Callable[[str], Parallelize]
) -> ModelParallel | None:
    """Cut the workload's model in place, if the mesh says so. Collective."""
    if ranks.groups is None or (ranks.groups.mesh.model_size == 1 and EXPERT not in ranks.groups.mesh.degrees):
        return None
    workload.model.to(ranks.device)
    return load_parallelize(config.choice)(workload.model, config, ranks.groups, ranks.device)


def build_strategy(
    config: RunConfig,
    workload: Workload,
    ranks: Ranks,
    strategy_class: type[Strategy],
    group: dist.ProcessGroup | None = None,
    model_parallel: ModelParallel | None = None,
) -> Strategy:
    """The strategy over the workload's model.

    Args:
        group: The ranks that see different samples. Default: those of the mesh, or all.
        model_parallel: How the model is cut over other ranks (`cut_over_ranks`).
    """
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
