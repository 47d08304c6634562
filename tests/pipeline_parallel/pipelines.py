"""Training over a mesh with stages inside ranks, as `tests.parity` trains over data-parallel ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import tensor_parallel
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.mesh import Mesh, mesh_groups
from ddp_lab.strategy.interface import Strategy
from tests.models import build, make_batch
from tests.parity import OPTIMIZERS, Split, global_batch
from tests.tensor_parallel.meshes import trained

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
        flags = {"pipeline_schedule": schedule, "stages_per_rank": stages_per_rank, **options}
        flags = {"bucket_cap_mb": 25.0} | flags if choice == "tp" else flags
        config = RunConfig.of(choice=choice, mesh=mesh, **flags)
        parts = tensor_parallel.REGISTRY.load_parallelize(choice)(module, config, groups, CPU)
        settings = replace(config.strategy, model_parallel=parts, shard_groups=groups.shard_groups)
        strategy_class = tensor_parallel.load(choice)
        strategy_class = strategy_class.in_stages() if parts.pipeline else strategy_class
        yield strategy_class(module, OPTIMIZERS[optimizer], settings, groups.data)


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
        result = trained(strategy, model, steps, clip)
        result["at_rest"] = [strategy.memory_breakdown()["parameters"]]
        result["whole"] = 4 * sum(parameter.numel() for parameter in strategy.module.parameters())
        with torch.no_grad():
            batch = make_batch(model, 8, 7)
            result["own_loss"] = strategy(**batch).loss.item()
            if model.startswith("lm"):
                result["logits"] = strategy(input_ids=batch["input_ids"]).logits
        strategy.zero_grad()
        strategy.forward_backward(global_batch(model, steps[0], 0)[strategy.data_parallel_rank])
        result["at_rest"].append(strategy.memory_breakdown()["parameters"])  # before the update, too
        return result
