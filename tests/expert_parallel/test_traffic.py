"""What ranks of ep announce is what they issue: counted at the process groups."""

from typing import Any

import pytest

from ddp_lab.runtime.mesh import Mesh
from tests.models import make_batch
from tests.pipeline_parallel.pipelines import strategy_in_pipeline
from tests.ranks import RankPool
from tests.tables import each_row
from tests.traffic import Totals, announced, counted_step


def one_step(mesh: str, choice: str, model: str, micro_batches: int, options: dict[str, Any]) -> tuple[Totals, Totals]:
    """Of the second step: announced, and issued in all groups."""
    with strategy_in_pipeline(mesh, choice, model, **options) as strategy:
        for step in range(2):
            seeds = [100 * strategy.group_rank + 10 * step + index for index in range(micro_batches)]
            issued = counted_step(strategy, [make_batch(model, 3, seed) for seed in seeds])
        return announced(strategy, micro_batches, clips=True), issued


@each_row(
    "mesh, choice, model, micro_batches, options",
    [
        ("dp=2,ep=2", "zero3", "lm, mixtral", 2, {"activation_checkpointing": "block"}),
        ("dp=2,ep=2", "tp", "lm, mixtral, no term", 2, {"bucket_cap_mb": 0.01}),
        ("ep=2,tp=2", "simple_ddp", "lm, mixtral", 2, {"precision": "bf16"}),
        ("dp=2,ep=2", "transformers_ep", "lm, mixtral", 2, {"precision": "bf16"}),
    ],
)
def test_announced_is_issued(
    ranks: RankPool, mesh: str, choice: str, model: str, micro_batches: int, options: dict[str, Any]
) -> None:
    check(ranks, mesh, choice, model, micro_batches, options)


@pytest.mark.slow
@each_row(
    "mesh, choice, model, micro_batches, options",
    [
        ("ep=2", "simple_ddp", "lm, mixtral", 1, {"precision": "bf16"}),
        ("dp=2,ep=2", "zero1", "lm, mixtral, no term", 2, {}),
        ("ep=2,tp=2", "zero3", "lm, qwen3", 1, {"activation_checkpointing": "selective"}),
        ("ep=2,tp=2", "zero2", "lm, qwen", 2, {"activation_checkpointing": "block"}),
        ("ep=2", "transformers_ep", "lm, qwen3", 1, {"activation_checkpointing": "torch:block"}),
    ],
)
def test_announced_is_issued_in_more_ways(
    ranks: RankPool, mesh: str, choice: str, model: str, micro_batches: int, options: dict[str, Any]
) -> None:
    check(ranks, mesh, choice, model, micro_batches, options)


def check(ranks: RankPool, mesh: str, choice: str, model: str, micro_batches: int, options: dict[str, Any]) -> None:
    found = ranks.run(Mesh.parse(mesh).size, one_step, mesh, choice, model, micro_batches, options)
    for wanted, issued in found:
        assert {kind: calls for kind, (calls, _) in issued.items()} == {kind: n for kind, (n, _) in wanted.items()}
        assert all(issued[kind] == wanted[kind] for kind in wanted if kind[0] != "all_to_all")
    rows = [
        [sum(n for kind, (_, n) in one.items() if kind[0] == "all_to_all") for one in each]
        for each in zip(*found, strict=True)
    ]
    assert sum(rows[0]) == sum(rows[1]), "rows that all ranks send"
