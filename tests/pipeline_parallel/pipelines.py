"""Training over a mesh with stages inside ranks, as `tests.parity` trains over data-parallel ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import tensor_parallel
from ddp_lab.runtime.mesh import Mesh, mesh_groups
from ddp_lab.strategy.interface import Strategy
from ddp_lab.strategy.precision import DTYPES
from pipeline_parallel.parallelize import cut_into_stages
from tests.models import build, make_batch
from tests.parity import OPTIMIZERS, Split, global_batch, options_of

CPU = torch.device("cpu")


@contextmanager
def strategy_in_pipeline(
    mesh: str,
    choice: str,
    model: str,
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    optimizer: str = "sgd",
    **options: Any,
) -> Iterator[Strategy]:
    """Within this context the groups of the mesh exist. Every rank starts from other weights; rank 0's win."""
    with mesh_groups(Mesh.parse(mesh), "cpu") as groups:
        module = build(model, seed=dist.get_rank())
        settings = options_of(("tensor_parallel", "baseline" if choice == "tp" else choice), **options)
        param_dtype = DTYPES[settings.param_dtype] if settings.param_dtype else None
        parts = cut_into_stages(module, groups, CPU, schedule, stages_per_rank, param_dtype=param_dtype)
        settings = replace(settings, model_parallel=parts, shard_groups=groups.shard_groups)
        yield tensor_parallel.load(choice).in_stages()(module, OPTIMIZERS[optimizer], settings, groups.data)


def train_in_pipeline(
    mesh: str,
    choice: str,
    model: str,
    steps: Sequence[Split],
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    optimizer: str = "sgd",
    clip: float | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `tests.parity.train_on_rank` answers; gradients and state on rank 0."""
    with strategy_in_pipeline(mesh, choice, model, schedule, stages_per_rank, optimizer, **(options or {})) as strategy:
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
        with torch.no_grad():
            result["own_loss"] = strategy(**make_batch(model, 4, 7)).loss.item()
        return result
