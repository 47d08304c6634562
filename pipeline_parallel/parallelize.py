"""Cuts a model into the stages of a pipeline, one or more for each rank."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import PIPELINE, MeshGroups, timeout_of
from ddp_lab.strategy.model_parallel import ModelParallel
from ddp_lab.strategy.replicated import broadcast_from_rank0
from ddp_lab.untrusted import settings_in
from pipeline_parallel.channels import open_channels
from pipeline_parallel.partition import Split, partition
from pipeline_parallel.runner import PipelineRunner
from pipeline_parallel.schedules import SCHEDULES
from pipeline_parallel.stage import Stages
from pipeline_parallel.tied import shared_of, tie
from tensor_parallel.parallelize import parallelize_for as cut_layers
from tensor_parallel.plan import STAGES
from tensor_parallel.traffic import TensorTraffic


def parallelize_for(
    module: nn.Module, config: RunConfig, groups: MeshGroups, device: torch.device, split: Split | None = None
) -> ModelParallel:
    """Cut `module` in place, as a run's settings say: its layers over `tp`, the module itself over `pp`.

    Args:
        split: Of blocks over stages. Default: what the settings say of it.
    """
    if groups.mesh.degree(PIPELINE) == 1:
        return cut_layers(module, config, groups, device)
    over_tensor = partial(cut_layers, module, config, groups, device) if config.cuts_layers else None
    schedule, stages_per_rank = config.pipeline_schedule, config.stages_per_rank
    return cut_into_stages(module, groups, device, schedule, stages_per_rank, split or split_of(config), over_tensor)


def split_of(config: RunConfig) -> Split | None:
    """How a run's settings cut its model."""
    if config.pipeline_split:
        if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", config.pipeline_split):
            wrong = f"--pipeline-split {config.pipeline_split}"
            raise UserError(f"{wrong}: write the number of blocks in each stage, such as 4,6,6,4")
        return [int(part) for part in config.pipeline_split.split(",")]
    if config.plan is None or (config.cuts_layers and STAGES not in settings_in(Path(config.plan), "--plan")):
        return None
    try:
        return msgspec.convert(settings_in(Path(config.plan), "--plan").get(STAGES), list[list[str]])
    except msgspec.ValidationError as error:
        example = 'stages = [["embed", "layers.0"], ["layers.1", "head"]]'
        raise UserError(f"--plan {config.plan}: {STAGES}: {error}; write for example {example}") from error


def cut_into_stages(
    module: nn.Module,
    groups: MeshGroups,
    device: torch.device,
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    split: Split | None = None,
    cut_over_tensor: Callable[[], ModelParallel] | None = None,
) -> ModelParallel:
    """Leave of `module` what belongs to this rank's stages, in place. Rank 0's parameters win. Collective.

    Args:
        schedule: One of `SCHEDULES`.
        split: Of blocks over stages. Default: by cost, of whole layers.
        cut_over_tensor: Cuts the layers over `groups.tensor`. Default: the mesh has no tp.

    Returns:
        What a strategy over `groups.data` must know of it.
    """
    group = groups.pipeline
    assert group is not None, "the mesh has pp"
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    broadcast_from_rank0([*module.parameters(), *module.buffers()], groups.model)
    chain, places = partition(module, ranks * stages_per_rank, split)
    own_stages, tokens = range(rank, ranks * stages_per_rank, ranks), None
    layers = ModelParallel(groups.model, groups.everyone, {}, groups.tensor)
    if cut_over_tensor is not None:
        layers = cut_over_tensor()
        chain = [(name, module.get_submodule(name)) for name, _ in chain]  # some have been replaced
        assert isinstance(layers.traffic, TensorTraffic)
        layers.traffic.keep([name for (name, _), stage in zip(chain, places, strict=True) if stage in own_stages])
        tokens = layers.traffic.ranks.tokens
    shared = shared_of(chain, places)
    is_ring, timeout = stages_per_rank > 1, timeout_of(groups.everyone)
    channels = open_channels(pipelines_of(groups), device, is_ring, bool(shared), timeout)
    stages = Stages(module, chain, places, own_stages, tokens)
    tied = tie(shared, module, channels, rank, ranks)
    pipeline = PipelineRunner(stages, channels, group, SCHEDULES[schedule], stages_per_rank, tied)
    aliases = {name: names[0] for names in shared.values() for name in names[1:]}
    return replace(layers, pipeline=pipeline, aliases=aliases)


def pipelines_of(groups: MeshGroups) -> list[list[int]]:
    """The ranks of each pipeline of the job, in the order of their stages."""
    mesh, names = groups.device_mesh.mesh, groups.device_mesh.mesh_dim_names
    assert names is not None
    along = names.index(PIPELINE)
    return mesh.movedim(along, -1).reshape(-1, mesh.shape[along]).tolist()
