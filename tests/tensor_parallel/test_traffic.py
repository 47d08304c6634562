"""What a choice on a mesh announces is what it issues: by kind and group size, counted at the process groups."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ddp_lab.runtime.watch.sequence import SIZED_BY_OUTPUT, described
from tests.models import make_batch
from tests.ranks import RankPool
from tests.tensor_parallel.meshes import strategy_on_mesh

HOOK = 41
Totals = dict[tuple[str, int], tuple[int, int]]
"""Calls and bytes, by kind and group size."""


def counted(mesh: str, choice: str, model: str, micro_batches: int, sequence_parallel: bool, options: Any) -> Any:
    """Of the second step: announced, and issued in all groups but the pool's own ones."""
    calls: Counter[tuple[str, int]] = Counter()
    sizes: Counter[tuple[str, int]] = Counter()
    with strategy_on_mesh(mesh, choice, model, sequence_parallel, **options) as strategy:
        for step in range(2):
            if step == 1:
                strategy.finish_parameter_synchronization()
                groups = {id(group): group for group in c10d._world.pg_map}
                for group in groups.values():
                    group.register_pre_hook(HOOK, counter(group, calls, sizes))
            strategy.zero_grad()
            batch_of = even_batch if choice.startswith("pytorch") else partial(make_batch, samples=3)
            strategy.forward_backward([batch_of(model, seed=10 * step + index) for index in range(micro_batches)])
            strategy.clip_grad_norm_(1.0)
            strategy.step()
        strategy.finish_parameter_synchronization()
        for group in groups.values():
            group.unregister_pre_hook(HOOK)
        announced: Totals = {}
        for one in strategy.expected_traffic(micro_batches, clips=True):
            before = announced.get((one.kind, one.group_size), (0, 0))
            announced[one.kind, one.group_size] = before[0] + one.count, before[1] + one.payload_bytes
    return announced, {key: (calls[key], sizes[key]) for key in calls}


def even_batch(model: str, seed: int) -> dict[str, Tensor]:
    """Of sequences that two ranks divide: torch cuts no others."""
    return {name: tensor[:, :6] for name, tensor in make_batch(model, 3, seed).items()}


def counter(group: dist.ProcessGroup, calls: Counter[tuple[str, int]], sizes: Counter[tuple[str, int]]) -> Any:
    def hook(call: Any) -> None:
        tensors = call.input_tensors or call.output_tensors
        kind, _, _ = described(call.name, tensors[0].dtype if tensors else None)
        if not kind or kind == "barrier":
            return
        sent = call.output_tensors if kind in SIZED_BY_OUTPUT else call.input_tensors
        size = sum(t.numel() * t.element_size() for t in sent) * (group.size() if kind == "scatter" else 1)
        calls[kind, group.size()] += 1
        sizes[kind, group.size()] += size

    return hook


@pytest.mark.parametrize(
    "mesh, choice, model, micro_batches, sequence_parallel, options",
    [
        ("tp=2", "tp", "lm, llama", 1, False, {}),
        ("tp=2", "zero3", "lm, gpt2", 2, True, {}),
        ("tp=2", "tp", "llama", 2, True, {}),
        ("dp=2,tp=2", "zero1", "lm, gqa", 2, True, {}),
        ("tp=4", "simple_ddp", "lm, gqa", 1, False, {}),
        ("tp=2", "tp", "plain", 1, False, {}),
        ("tp=2", "tp", "lm, llama", 1, False, {"precision": "bf16"}),
        ("tp=2", "tp", "lm, gpt2", 1, True, {"precision": "bf16"}),
        ("tp=2", "zero2", "lm, llama", 1, True, {"param_dtype": "bf16"}),
        ("tp=2", "zero3", "lm, llama", 1, True, {"precision": "bf16"}),
        ("tp=2", "zero1", "lm, llama", 2, False, {"activation_checkpointing": "block"}),
        ("tp=2", "zero1", "lm, llama", 1, True, {"activation_checkpointing": "every:2"}),
        ("tp=2", "zero1", "lm, llama", 1, True, {"activation_checkpointing": "torch:block"}),
        ("tp=2", "zero1", "lm, llama", 1, False, {"activation_checkpointing": "selective"}),
        ("tp=2", "tp", "lm, llama", 1, True, {"async_tensor_parallel": 2}),
        ("tp=2", "tp", "lm, gpt2", 2, True, {"async_tensor_parallel": 3, "precision": "bf16"}),
        ("tp=4", "tp", "lm, gqa", 1, True, {"async_tensor_parallel": 2}),
        ("tp=2", "zero3", "lm, llama", 1, True, {"async_tensor_parallel": 2, "activation_checkpointing": "block"}),
        (
            "tp=2",
            "zero1",
            "lm, llama",
            1,
            True,
            {"async_tensor_parallel": 2, "activation_checkpointing": "torch:block"},
        ),
        ("tp=2", "pytorch_tp", "lm, even", 1, True, {}),
        ("tp=2", "pytorch_tp", "lm, even", 2, False, {"precision": "bf16"}),
        ("dp=2,tp=2", "pytorch_fsdp_tp", "lm, even", 1, False, {}),
        ("dp=2,tp=2", "pytorch_fsdp_tp", "lm, even", 2, True, {}),
    ],
)
def test_announced_is_issued(
    ranks: RankPool, mesh: str, choice: str, model: str, micro_batches: int, sequence_parallel: bool, options: Any
) -> None:
    world_size = 4 if mesh in ("dp=2,tp=2", "tp=4") else 2
    for announced, issued in ranks.run(
        world_size, counted, mesh, choice, model, micro_batches, sequence_parallel, options
    ):
        assert announced == issued
