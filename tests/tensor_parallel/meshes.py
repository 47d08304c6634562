"""Training over a mesh inside ranks, as `tests.parity` trains over data-parallel ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import tensor_parallel
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.mesh import Mesh, mesh_groups
from ddp_lab.strategy.interface import Strategy
from reference.dtensors import local
from tensor_parallel.parallelize import parallelize
from tensor_parallel.plan import Column, Plan, Row, plan_of
from tensor_parallel.traffic import Precision
from tests.models import build, make_batch
from tests.parity import OPTIMIZERS, Split, assert_parity, global_batch, options_of, oracle, watch_parameters
from tests.ranks import RankPool

HAND_WRITTEN = tuple(name for name in tensor_parallel.CHOICES if not name.startswith(("pytorch", "transformers")))
CPU = torch.device("cpu")
PLANS: dict[str, Plan] = {
    "plain": {"net.0": Column(), "net.2": Row()},
    "frozen": {"middle": Column(), "last": Row()},
    "adapted": {"blocks.*.base": Column(), "blocks.*.adapter": Row()},
    "odd": {"large": Column(), "last": Row()},
    "branching": {"a": Column(), "b": Column(), "spare": Column(), "last": Row()},
    "deep": {f"blocks.{n}.0": Row() if n % 2 else Column() for n in range(6)},
}
"""Of the trap modules; those of transformers' models are built in."""


@contextmanager
def strategy_on_mesh(
    mesh: str,
    choice: str,
    model: str,
    sequence_parallel: bool = False,
    optimizer: str = "sgd",
    seed: int | None = None,
    **options: Any,
) -> Iterator[Strategy]:
    """Within this context the groups of the mesh exist. Every rank starts from other weights; rank 0's win."""
    with mesh_groups(Mesh.parse(mesh), "cpu") as groups:
        _clear_sharding_prop_cache()  # which holds meshes of groups that are gone
        module = build(model, seed=dist.get_rank() if seed is None else seed)
        settings = options_of(("tensor_parallel", "baseline" if choice == "tp" else choice), **options)
        if choice.startswith("pytorch"):
            config = RunConfig.of(
                choice=choice, mesh=mesh, sequence_parallel=sequence_parallel, precision=settings.precision
            )
            parts = tensor_parallel.REGISTRY.load_parallelize(choice)(module, config, groups, CPU)
        else:
            plan = PLANS.get(model) or plan_of(module, groups.mesh.model_size)
            precision = Precision.of(settings.precision, settings.param_dtype)
            recomputed = settings.activation_checkpointing
            parts = parallelize(module, plan, groups, CPU, sequence_parallel, precision, recomputed)
        settings = replace(settings, model_parallel=parts, shard_groups=groups.shard_groups)
        yield tensor_parallel.load(choice)(module, OPTIMIZERS[optimizer], settings, groups.data)


def trained(strategy: Strategy, model: str, steps: Sequence[Split], clip: float | None) -> dict[str, Any]:
    """What training from the weights of seed 0 gives; gradients and state on rank 0. The module then evaluates."""
    result: dict[str, Any] = {"loss": [], "norm": [], "grad_norm": [], "gradients": {}}
    strategy.load_full_state_dict(build(model).state_dict() if dist.get_rank() == 0 else {})
    for index, split in enumerate(steps):
        strategy.zero_grad()
        mine = global_batch(model, split, index)[strategy.data_parallel_rank]
        loss = strategy.forward_backward(mine)
        result["grad_norm"].append(strategy.verdict.loss_and_norm[1])
        if clip is not None:
            result["norm"].append(strategy.clip_grad_norm_(clip).item())
        if index == 0:
            result["gradients"] = strategy.full_gradients()
        strategy.step()
        result["loss"].append(loss.item())
    result["state"] = strategy.full_state_dict()
    strategy.module.eval()
    return result


def train_on_mesh(
    mesh: str,
    choice: str,
    model: str,
    steps: Sequence[Split],
    sequence_parallel: bool = False,
    optimizer: str = "sgd",
    clip: float | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `tests.parity.train_on_rank` answers; gradients and state on rank 0."""
    with strategy_on_mesh(mesh, choice, model, sequence_parallel, optimizer, **(options or {})) as strategy:
        result = trained(strategy, model, steps, clip)
        seen = watch_parameters(strategy.module)
        with torch.no_grad():
            result["own_loss"] = strategy(**make_batch(model, 4, 7)).loss.item()
        assert strategy.model_parallel is not None
        mesh_of_run = Mesh.parse(mesh)
        result["model_rank"] = dist.get_rank() % mesh_of_run.model_size
        cuts = strategy.model_parallel.cuts
        result["alike"] = {
            name: local(seen[name]) for name in seen if name not in cuts and "." in name and not is_cut(seen[name])
        }
        result["own_state"] = {name: local(tensor) for name, tensor in seen.items()}
        return result


def check_on_mesh(
    ranks: RankPool,
    mesh: str,
    choice: str,
    model: str,
    steps: Sequence[Split],
    optimizer: str = "sgd",
    sequence_parallel: bool = False,
    clip: float | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Train on a mesh and in one process: the same losses, norms, gradients and parameters, and replicas that are
    bitwise equal."""
    size = Mesh.parse(mesh)
    results = ranks.run(
        size.size, train_on_mesh, mesh, choice, model, steps, sequence_parallel, optimizer, clip, options
    )
    for other in results[1:]:  # what all ranks hold
        for name, tensor in results[0]["alike"].items():
            assert torch.equal(tensor, other["alike"][name]), f"{mesh} {choice} {model}: {name} differs between ranks"
    for model_rank in range(size.model_size):  # what ranks with the same part hold
        replicas = [result for result in results if result["model_rank"] == model_rank]
        replicas[0] = {**replicas[0], "gradients": results[0]["gradients"], "state": results[0]["state"]}
        assert_parity(replicas, oracle(model, steps, optimizer, clip), {"sgd": 1e-6, "adam": 1e-5}[optimizer])


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether torch has cut it."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def even(mesh: str) -> Split:
    """Two micro-batches for each rank that sees different samples."""
    return [[2, 1]] * Mesh.parse(mesh).data_size
