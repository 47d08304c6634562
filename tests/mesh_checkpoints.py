"""Strategies on meshes that save and load, inside ranks (`tests.ranks`), and what all their ranks hold together."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ddp_lab
import tensor_parallel
from ddp_lab.runtime.checkpoint.state import COUNT
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.mesh import EXPERT, PIPELINE, TENSOR, Mesh, mesh_groups
from ddp_lab.strategy.strategy import Strategy
from pipeline_parallel.parallelize import cut_into_stages
from tensor_parallel.parallelize import parallelize
from tensor_parallel.plan import plan_of
from tests.models import build, make_batch

CPU = torch.device("cpu")
STEPS = 2
"""Of each leg of a relay."""
SAMPLES = 4


class MeshPlace(NamedTuple):
    """Where a strategy runs. `stages`: the schedule, the number of stages on a rank, and the split."""

    ranks: int
    mesh: str
    choice: str
    stages: tuple[str, int, list[int] | None] = ("1f1b", 1, None)


PLACES = {
    "one rank": MeshPlace(1, "tp=1", "zero2"),
    "zero3 on tp=2": MeshPlace(2, "tp=2", "zero3"),
    "plain": MeshPlace(2, "dp=2", "bucket_ddp_async"),
    "tp=4, whose ranks share keys": MeshPlace(4, "tp=4", "bucket_ddp_async"),
    "zero3 on shard=2,tp=2": MeshPlace(4, "shard=2,tp=2", "zero3"),
    "zero1 on dp=2,tp=2": MeshPlace(4, "dp=2,tp=2", "zero1"),
    "pp=4": MeshPlace(4, "pp=4", "bucket_ddp_async"),
    "two stages a rank": MeshPlace(2, "pp=2", "zero1", ("interleaved", 2, None)),
    "another split": MeshPlace(2, "pp=2", "simple_ddp", ("zb-h1", 1, [5, 3])),
    "zero2 on dp=2,pp=2": MeshPlace(4, "dp=2,pp=2", "zero2", ("gpipe", 1, None)),
    "zero3 on dp=2,pp=2": MeshPlace(4, "dp=2,pp=2", "zero3"),
    "zero1 on ep=4": MeshPlace(4, "ep=4", "zero1"),
    "zero3 on dp=2,ep=2": MeshPlace(4, "dp=2,ep=2", "zero3"),
    "zero2 on ep=2,tp=2": MeshPlace(4, "ep=2,tp=2", "zero2"),
    "zero1 on pp=2,tp=2": MeshPlace(4, "pp=2,tp=2", "zero1", ("interleaved", 2, None)),
}


@contextmanager
def strategy_on(place: MeshPlace, model: str, seed: int) -> Iterator[Strategy]:
    mesh, module, strategy_class = Mesh.parse(place.mesh), build(model, seed), ddp_lab.load(place.choice)
    with mesh_groups(mesh, "cpu") as groups:
        cut, tp = None, mesh.degree(TENSOR)
        has_plan = tp > 1 and EXPERT not in mesh.degrees
        over_tensor = partial(parallelize, module, plan_of(module, tp), groups, CPU) if has_plan else None
        if EXPERT in mesh.degrees:
            config = RunConfig.of(choice=place.choice, mesh=place.mesh)
            cut = tensor_parallel.REGISTRY.load_parallelize(place.choice)(module, config, groups, CPU)
        elif PIPELINE in mesh.degrees:
            cut, strategy_class = (
                cut_into_stages(module, groups, CPU, *place.stages, over_tensor),
                strategy_class.in_stages(),
            )
        elif over_tensor:
            cut = over_tensor()
        options = ddp_lab.StrategyOptions(bucket_cap_mb=25.0, model_parallel=cut)
        yield strategy_class(module, make_optimizer, options, groups.data)


def make_optimizer(params) -> torch.optim.Optimizer:
    """Its eps is large, or it would magnify the rounding of gradients that should be 0, such as those of key biases."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def train(strategy: Strategy, model: str, first: int) -> list[float]:
    """The losses of some steps, whose samples are the same on any mesh."""
    losses = []
    for step in range(first, first + STEPS):
        rank, size = strategy.data_parallel_rank, strategy.data_parallel_size
        local_batch = {name: tensor[rank::size] for name, tensor in make_batch(model, SAMPLES, step).items()}
        strategy.zero_grad()
        losses.append(strategy.forward_backward([local_batch]).item())
        strategy.step()
    return losses


def gathered_states(strategy: Strategy) -> dict[str, Tensor]:
    """Full parameters and optimizer states, assembled from the shards of all ranks; on rank 0 also buffers. Collective.

    Asserts that what several ranks hold is bitwise equal.
    """
    parallel = strategy.model_parallel
    shapes = {name: p.shape for name, p in strategy.module.named_parameters()}
    cuts = parallel.cuts if parallel else {}
    of_cut = {name: parallel.rank_in(cut) for name, cut in cuts.items()} if parallel else {}
    tensor_rank = parallel.tensor_rank if parallel else 0
    states_by_rank: list[Any] = [None] * dist.get_world_size()
    shards = [(of_cut.get(name, tensor_rank), shapes[name], name, *state) for name, *state in local_states(strategy)]
    dist.all_gather_object(states_by_rank, shards)
    parts: dict[tuple[str, str, int], Tensor] = {}
    for rank, shape, name, key, start, values in (piece for pieces in states_by_rank for piece in pieces):
        part = parts.setdefault((key, name, rank), torch.full(() if key == COUNT else shape, torch.nan))
        put_equal(part.view(-1)[0 if key == COUNT else start :][: len(values)], values)
    full: dict[str, Tensor] = {}
    for (key, name, rank), part in parts.items():
        assert not part.isnan().any(), f"nobody holds some elements of {key} {name}"
        cut = None if key == COUNT else cuts.get(name)
        if cut:
            cut.put(full.setdefault(f"{key} {name}", torch.full(cut.whole_shape(part), torch.nan)), part, rank)
        else:
            put_equal(full.setdefault(f"{key} {name}", part), part)
    return full | {f"state {name}": tensor for name, tensor in strategy.full_state_dict().items()}


def local_states(strategy: Strategy) -> Iterator[tuple[str, str, int, Tensor]]:
    """Of each piece on this rank: the parameter's name, the kind of state, the first element, and the elements."""
    strategy.finish_parameter_synchronization()
    for name, start, tensor in strategy.parameter_pieces():
        yield name, "parameter", start, strategy.on_this_rank(tensor).reshape(-1)
    for name, start, tensor in strategy.updated_pieces():
        for state, value in strategy.updating_optimizer.state[tensor].items():
            yield name, state, start, strategy.on_this_rank(value).reshape(-1)


def put_equal(target: Tensor, values: Tensor):
    """Fill `target`, which is NaN or equal to `values` already."""
    assert target.isnan().all() or torch.equal(target, values), "ranks hold different values"
    target.copy_(values)


class Leg(NamedTuple):
    """Gathered states after loading and before saving; rank 0's state dict, and the losses of the steps."""

    loaded: dict[str, Tensor]
    saved: dict[str, Tensor]
    state_dict: dict[str, Tensor]
    losses: list[float]


def run_leg(place: MeshPlace, model: str, leg: int, before: Path | None, after: Path | None) -> Leg:
    with strategy_on(place, model, seed=leg) as strategy:
        if before:
            ddp_lab.load_checkpoint(strategy, before)
        loaded = gathered_states(strategy) if before else {}
        losses = train(strategy, model, leg * STEPS)
        if after:
            ddp_lab.save_checkpoint(strategy, after)
        return Leg(loaded, gathered_states(strategy), strategy.full_state_dict(), losses)


def straight(model: str, legs: int) -> tuple[dict[str, Tensor], list[float]]:
    """All steps on one rank, without a stop."""
    with strategy_on(PLACES["one rank"], model, seed=0) as strategy:
        losses = [loss for leg in range(legs) for loss in train(strategy, model, leg * STEPS)]
        return strategy.full_state_dict(), losses
