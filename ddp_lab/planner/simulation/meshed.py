"""Choices over a mesh of pretended ranks: the groups, and the parts of the model, are made by the code that runs make
theirs with."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import ddp
import sharding
import tensor_parallel
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.simulation.network import CannotSimulate
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import CONTEXT, PIPELINE, TENSOR, Mesh, MeshGroups, mesh_groups
from ddp_lab.runtime.settings.mesh import RING
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.strategy.strategy import Strategy
from expert_parallel import dispatch, experts
from pipeline_parallel import channels

CPU = torch.device("cpu")
"""Where tensors without data are said to lie."""


def load(config: RunConfig) -> type[Strategy]:
    """The strategy of the configuration's choice and mesh."""
    choice, cuts = config.choice, is_cut(config)
    if choice.startswith("deepspeed"):
        raise CannotSimulate(f"{choice}: DeepSpeed compiles extensions of its own that read and write real memory")
    if cuts and choice.startswith(("pytorch", "transformers")):
        raise CannotSimulate(
            "PyTorch's and transformers' own ways to cut a model are not simulated; plan tp, or zero1 to zero3"
        )
    for family in (tensor_parallel,) if cuts else (ddp, sharding):
        if choice in family.CHOICES:
            return family.load(choice)
    if choice in tensor_parallel.CHOICES:
        raise UserError(f"{choice}: it cuts the model; give a --mesh with tp or pp above 1")
    raise UserError(f"{choice}: no such strategy" + " on a mesh with tp or pp" * cuts)


def is_cut(config: RunConfig) -> bool:
    """Whether the mesh cuts the model over ranks."""
    return config.cuts_layers or config.has_stages or config.cuts_tokens or config.has_experts


def speaker(config: RunConfig) -> int:
    """The rank that is simulated for all: 0, but where a ring's parts are contiguous, so that under the causal mask the
    last one has most to compute, that one."""
    if not config.cuts_tokens or config.context_parallel != RING:
        return 0
    mesh = Mesh.parse(config.mesh or "")
    places = {rank: mesh.coordinates(rank) for rank in range(mesh.size)}
    return next(rank for rank, place in places.items() if place[CONTEXT] == mesh.degree(CONTEXT) - 1)


def pipeline_of(config: RunConfig, rank: int) -> Sequence[int]:
    """The ranks of the pipeline that `rank` is in, in the order of their stages; without one, `rank` alone."""
    if not config.has_stages:
        return [rank]
    mesh = Mesh.parse(config.mesh or "")
    stride, stages = mesh.degree(TENSOR), mesh.degree(PIPELINE)  # tp is the only dimension further inside
    first = rank - mesh.coordinates(rank)[PIPELINE] * stride
    return range(first, first + stages * stride, stride)


@contextmanager
def groups_of(config: RunConfig, cluster: Cluster) -> Iterator[MeshGroups | None]:
    """Within this context the groups of the configuration's mesh exist in the pretended world. None without a mesh."""
    if config.mesh is None:
        yield None
        return
    mesh = Mesh.parse(config.mesh)
    mesh.require_ranks(cluster.world_size, cluster.ranks_per_node)
    with mesh_groups(mesh, CPU.type) as groups:
        yield groups


Forms = dict[Hashable, Any]
"""Of messages, by key (`pipeline_parallel.channels`)."""


class KnownChannel(channels.Channel):
    """Both of its ends know the form of a message once any rank has sent one like it: nobody is here who could tell."""

    def __init__(self, forms: Forms, *args: Any) -> None:
        super().__init__(*args)
        self._forms = forms

    def send(self, key: Hashable, tensor: Tensor, name: Hashable = None) -> None:
        self._forms[without_stage(key)] = tensor.dtype, list(tensor.shape)
        super().send(without_stage(key), tensor, name)

    def receive(self, key: Hashable) -> channels.Receipt:
        return super().receive(without_stage(key))


def without_stage(key: Hashable) -> Hashable:
    """All stages are taken to make hidden states of one form."""
    return key[1:] if isinstance(key, tuple) else key


def on_mesh(
    options: StrategyOptions, module: nn.Module, config: RunConfig, groups: MeshGroups | None, forms: Forms
) -> StrategyOptions:
    """The options with what a strategy must know of the mesh. Cuts `module` in place, if the mesh says so. `forms`: of
    messages that other ranks of a pipeline have sent."""
    if groups is None:
        return options
    if is_cut(config):
        parallelize = tensor_parallel.REGISTRY.load_parallelize(config.choice)
        with mock.patch.object(channels, "Channel", partial(KnownChannel, forms)):
            options = replace(options, model_parallel=parallelize(module, config, groups, CPU))
    return replace(options, shard_groups=groups.shard_groups)


@contextmanager
def evenly_routed(is_cuda: bool, on_wait: Callable[[], object]) -> Iterator[None]:
    """Within this context ranks send equally many rows to each expert. `is_cuda`: the device is a GPU, where one kernel
    multiplies the rows of all experts. `on_wait`: called where the host waits for the device."""

    def even(counts_by_rank: Tensor, rows: int) -> list[list[list[int]]]:
        on_wait()
        _, ranks, per_rank = counts_by_rank.shape
        counts = evenly(rows, ranks * per_rank)
        by_rank = [counts[first : first + per_rank] for first in range(0, ranks * per_rank, per_rank)]
        return [by_rank, by_rank]  # as many rows come as go

    with (
        mock.patch.object(dispatch, "on_host", even),
        mock.patch.object(experts, "has_kernel", lambda _: is_cuda),
    ):
        yield


def evenly(rows: int, experts: int) -> list[int]:
    """Rows of each expert. The first ones have one more, where they do not divide."""
    share, more = divmod(rows, experts)
    return [share + (expert < more) for expert in range(experts)]
