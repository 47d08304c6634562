"""Cuts a model into the stages of a pipeline, one or more for each rank."""

import re
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UnsupportedError, UserError
from ddp_lab.runtime.mesh import PIPELINE, TENSOR, MeshGroups, timeout_of
from ddp_lab.strategy.model_parallel import ModelParallel
from ddp_lab.strategy.replicated import broadcast_from_rank0
from pipeline_parallel.channels import open_channels
from pipeline_parallel.partition import chain_of, costs_of, cut_by_cost, shared_of, stages_of
from pipeline_parallel.runner import Pipeline
from pipeline_parallel.schedules import SCHEDULES
from pipeline_parallel.stage import Stages
from pipeline_parallel.tied import tie
from tensor_parallel.parallelize import parallelize_for as cut_layers


def parallelize_for(module: nn.Module, config: RunConfig, groups: MeshGroups, device: torch.device) -> ModelParallel:
    """Cut `module` in place, as a run's settings say: its layers over `tp`, or the module itself into stages over `pp`.

    Raises:
        UnsupportedError: it cannot be cut so.
    """
    if groups.mesh.degree(PIPELINE) == 1:
        return cut_layers(module, config, groups, device)
    if groups.mesh.degree(TENSOR) > 1:
        raise UnsupportedError("--mesh with pp and tp: a stage's layers are not cut yet; take one of the two")
    return cut_into_stages(
        module,
        groups,
        device,
        config.pipeline_schedule,
        config.stages_per_rank,
        read_split(config.pipeline_split) if config.pipeline_split else None,
    )


def read_split(text: str) -> list[int]:
    """
    Raises:
        UserError: it is no list of numbers.
    """
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UserError(f"--pipeline-split {text}: write the number of blocks in each stage, such as 4,6,6,4")
    return [int(part) for part in text.split(",")]


def cut_into_stages(
    module: nn.Module,
    groups: MeshGroups,
    device: torch.device,
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    split: Sequence[int] | None = None,
) -> ModelParallel:
    """Leave of `module` what belongs to this rank's stages, in place. Rank 0's parameters win. Collective.

    Args:
        schedule: One of `SCHEDULES`.
        split: The number of blocks in each stage. Default: cut by cost.

    Returns:
        What a strategy over `groups.data` must know of it.

    Raises:
        UnsupportedError: the model cannot be cut into so many stages.
    """
    group = groups.pipeline
    assert group is not None, "the mesh has pp"
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    broadcast_from_rank0([*module.parameters(), *module.buffers()], groups.model)
    chain, are_blocks = chain_of(module)
    split = split or cut_by_cost(costs_of(chain), are_blocks, ranks * stages_per_rank)
    if len(split) != ranks * stages_per_rank:
        wanted = f"{ranks} ranks x {stages_per_rank} = {ranks * stages_per_rank}"
        raise UnsupportedError(f"--pipeline-split: {len(split)} numbers for {wanted} stages")
    places = stages_of(are_blocks, split)
    shared = shared_of(chain, places)
    is_ring, timeout = stages_per_rank > 1, timeout_of(groups.everyone)
    channels = open_channels(pipelines_of(groups), device, is_ring, bool(shared), timeout)
    stages = Stages(module, chain, places, range(rank, len(split), ranks))
    tied = tie(shared, module, channels, rank, ranks)
    pipeline = Pipeline(stages, channels, group, SCHEDULES[schedule], stages_per_rank, tied)
    aliases = {name: names[0] for names in shared.values() for name in names[1:]}
    return ModelParallel(groups.model, groups.everyone, {}, groups.tensor, pipeline, aliases)


def pipelines_of(groups: MeshGroups) -> list[list[int]]:
    """The ranks of each pipeline of the job, in the order of their stages."""
    mesh, names = groups.device_mesh.mesh, groups.device_mesh.mesh_dim_names
    assert names is not None
    along = names.index(PIPELINE)
    return mesh.movedim(along, -1).reshape(-1, mesh.shape[along]).tolist()
