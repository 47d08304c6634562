"""What a choice on a mesh announces is what it issues: by kind and group size, counted at the process groups."""

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from tests.models import make_batch
from tests.ranks import RankPool
from tests.tensor_parallel.meshes import strategy_on_mesh
from tests.traffic import announced, counted_step


def one_step(mesh: str, choice: str, model: str, micro_batches: int, sequence_parallel: bool, options: Any) -> Any:
    """Of the second step: announced, and issued in all groups."""
    batch_of = even_batch if choice.startswith("pytorch") else partial(make_batch, samples=3)
    with strategy_on_mesh(mesh, choice, model, sequence_parallel, **options) as strategy:
        for step in range(2):
            batches = [batch_of(model, seed=10 * step + index) for index in range(micro_batches)]
            issued = counted_step(strategy, batches)
        return announced(strategy, micro_batches, clips=True), issued


def even_batch(model: str, seed: int) -> dict[str, Tensor]:
    """Of sequences that two ranks divide: torch cuts no others."""
    return {name: tensor[:, :6] for name, tensor in make_batch(model, 3, seed).items()}


@pytest.mark.parametrize(
    "mesh, choice, model, micro_batches, sequence_parallel, options",
    [
        ("tp=2", "zero3", "lm, gpt2", 2, True, {}),
        ("dp=2,tp=2", "zero1", "lm, gqa", 2, True, {}),
        ("tp=4", "simple_ddp", "lm, gqa", 1, False, {}),
        ("tp=2", "tp", "plain", 1, False, {}),
        ("tp=2", "tp", "llama", 2, True, {"precision": "bf16"}),
        ("tp=2", "zero2", "lm, llama", 1, True, {"param_dtype": "bf16"}),
        ("tp=2", "zero1", "lm, llama", 2, False, {"activation_checkpointing": "block"}),
        ("tp=2", "zero1", "lm, llama", 1, True, {"activation_checkpointing": "selective"}),
        ("tp=2", "tp", "lm, gpt2", 2, True, {"precision": "bf16"}),
        ("tp=2", "zero3", "lm, llama", 1, True, {"activation_checkpointing": "torch:block"}),
        ("tp=2", "pytorch_tp", "lm, even", 1, True, {}),
        ("dp=2,tp=2", "pytorch_fsdp_tp", "lm, even", 2, True, {}),
    ],
)
def test_announced_is_issued(
    ranks: RankPool, mesh: str, choice: str, model: str, micro_batches: int, sequence_parallel: bool, options: Any
) -> None:
    world_size = 4 if mesh in ("dp=2,tp=2", "tp=4") else 2
    arguments = (mesh, choice, model, micro_batches, sequence_parallel, options)
    for wanted, issued in ranks.run(world_size, one_step, *arguments):
        assert issued == wanted
