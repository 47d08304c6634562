"""What a rank of cp holds for backward is its part of what one process holds."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import build
from tests.parity import Case, strategy_of
from tests.ranks import RankPool
from tests.tables import each_row

SAMPLES, LENGTH, FEATURES, LAYERS = 2, 48, 24, 2
SMALL = 1024
"""Bytes: more than targets and counts take, and less than a rank's part of one activation."""


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(41, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def saved_in(module: nn.Module, forward) -> int:
    """Bytes of the storages that autograd saves in a forward pass, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        answer = forward(**batch())
    assert answer.loss is not None
    return sum(storage.nbytes() for place, storage in storages.items() if place not in weights)


def saved_bytes(mesh: str, model: str, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes saved on this rank, and in one process."""
    with strategy_of(Case("tp", model, mesh, options)) as strategy:
        alone = build(model)
        return saved_in(strategy.module, strategy), saved_in(alone, alone)


@each_row(
    "ranks_of_cp, model, way, outputs",
    [
        (2, "lm, qwen2", "ring", 1),
        (3, "lm, llama", "zigzag", 1),
        (2, "lm, qwen2", "ulysses", 2),
        (4, "lm, qwen2", "pytorch_cp", 2),
    ],
)
def test_a_rank_holds_its_part(ranks: RankPool, ranks_of_cp, model, way, outputs):
    """`outputs`: how many copies of an attention's outputs are saved: its own, and one in the layout that follows. The
    last rank of torch's ring makes no copy."""
    assert 4 * SAMPLES * LENGTH * FEATURES / ranks_of_cp > 2 * SMALL
    results = ranks.run(ranks_of_cp, saved_bytes, f"cp={ranks_of_cp}", model, {"context_parallel": way})
    for rank, (sharded, alone) in enumerate(results):
        times = 0 if way == "pytorch_cp" and rank == ranks_of_cp - 1 else outputs - 1
        again = times * 4 * SAMPLES * LENGTH * FEATURES * LAYERS
        assert abs(sharded - (alone + again) / ranks_of_cp) < SMALL
