"""Choices over a mesh of pretended ranks: the groups, and the parts of the model, are made by the code that runs make
theirs with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

import ddp
import sharding
import tensor_parallel
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.simulation.network import CannotSimulate
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh, MeshGroups, mesh_groups
from ddp_lab.strategy.interface import Strategy
from ddp_lab.strategy.options import StrategyOptions

CPU = torch.device("cpu")
"""Where tensors without data are said to lie."""


def load(config: RunConfig) -> type[Strategy]:
    """The strategy of the configuration's choice and mesh.

    Raises:
        CannotSimulate: it cannot run without data.
        UserError: there is none.
    """
    choice, cuts = config.choice, is_cut(config)
    if choice.startswith("deepspeed"):
        raise CannotSimulate(f"{choice}: DeepSpeed compiles extensions of its own that read and write real memory")
    if cuts and choice.startswith("pytorch"):
        raise CannotSimulate("pytorch_tp, pytorch_fsdp_tp: DTensors are not simulated; plan tp, or zero1 to zero3")
    for family in (tensor_parallel,) if cuts else (ddp, sharding):
        if choice in family.CHOICES:
            return family.load(choice)
    if choice in tensor_parallel.CHOICES:
        raise UserError(f"{choice}: it cuts layers; give a --mesh with tp above 1")
    raise UserError(f"{choice}: no such choice" + " on a mesh with tp" * cuts)


def is_cut(config: RunConfig) -> bool:
    """Whether the mesh cuts layers over ranks."""
    return config.mesh is not None and Mesh.parse(config.mesh).model_size > 1


@contextmanager
def groups_of(config: RunConfig, cluster: Cluster) -> Iterator[MeshGroups | None]:
    """Within this context the groups of the configuration's mesh exist in the pretended world. None without a mesh.

    Raises:
        UserError: the mesh does not fit the cluster.
    """
    if config.mesh is None:
        yield None
        return
    mesh = Mesh.parse(config.mesh)
    mesh.require_ranks(cluster.world_size, cluster.ranks_per_node)
    with mesh_groups(mesh, CPU.type) as groups:
        yield groups


def on_mesh(
    options: StrategyOptions, module: nn.Module, config: RunConfig, groups: MeshGroups | None
) -> StrategyOptions:
    """The options with what a strategy must know of the mesh. Cuts `module` in place, if the mesh says so.

    Raises:
        UnsupportedError: a layer cannot be cut.
    """
    if groups is None:
        return options
    if groups.mesh.model_size > 1:
        parallelize = tensor_parallel.REGISTRY.load_parallelize(config.choice)
        options = replace(options, model_parallel=parallelize(module, config, groups, CPU))
    return replace(options, shard_groups=groups.shard_groups)
