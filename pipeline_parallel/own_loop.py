"""Pipelines in a training loop of your own (docs/own-loop.md)."""

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh, MeshGroups, open_groups
from ddp_lab.strategy.model_parallel import ModelParallel
from ddp_lab.strategy.optimizers import MakeOptimizer
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.strategy.strategy import Strategy
from pipeline_parallel.parallelize import parallelize_for
from pipeline_parallel.partition import Split
from tensor_parallel import REGISTRY

CHOICES = tuple(name for name in REGISTRY.names if not name.startswith("pytorch"))


@dataclass(frozen=True)
class OwnPipeline:
    """A model that is cut into stages, and the ranks that hold them."""

    module: nn.Module
    groups: MeshGroups
    parts: ModelParallel
    options: StrategyOptions

    def strategy(self, choice: str, make_optimizer: MakeOptimizer) -> Strategy:
        """The strategy over a rank's stages, as `ddp_lab.load(choice)` makes one over a whole model.

        Raises:
            UserError: no pipeline runs under a strategy of this name.
        """
        if choice not in CHOICES:
            raise UserError(unknown_name("strategy", choice, CHOICES))
        sharded = self.groups.shard_groups
        settings = replace(self.options, model_parallel=self.parts, shard_groups=sharded)
        return REGISTRY.load(choice).in_stages()(self.module, make_optimizer, settings, self.groups.data)


def pipeline(
    module: nn.Module,
    mesh: str,
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    split: Split | None = None,
    options: StrategyOptions | None = None,
) -> OwnPipeline:
    """Cut `module` into stages in place, over the ranks of the job. Rank 0's parameters win. Collective.

    Args:
        mesh: The ranks by dimension: `pp=4`, or `dp=2,pp=2`. With tp, for models that have a plan here.
        schedule: `gpipe`, `1f1b`, `interleaved` or `zb-h1`.
        stages_per_rank: At least 2 with `interleaved`, else 1.
        split: For each stage the number of its blocks, or the names of its modules, in which `*` is any part of a name.
            Default: cut by cost.
        options: Of the strategy.

    Raises:
        UserError: mesh, schedule or model cannot be run so; says why, in the words of the command line.
    """
    strategy = options or StrategyOptions()
    config = RunConfig(
        choice="tp", strategy=strategy, mesh=mesh, pipeline_schedule=schedule, stages_per_rank=stages_per_rank
    )
    degrees = Mesh.parse(mesh)
    if not config.has_stages:
        raise UserError(f"mesh {mesh}: a pipeline of your own needs pp above 1")
    degrees.require_ranks(dist.get_world_size(), dist.get_world_size())
    device = next(module.parameters()).device
    groups = open_groups(degrees, device.type)
    return OwnPipeline(module, groups, parallelize_for(module, config, groups, device, split), strategy)
