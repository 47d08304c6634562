"""Each choice, in each schedule, computes what one process computes on the whole global batch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ddp_lab.runtime.mesh import Mesh
from pipeline_parallel.schedules import SCHEDULES
from tests.models import build, make_batch
from tests.parity import Split, assert_parity, oracle
from tests.pipeline_parallel.pipelines import train_in_pipeline
from tests.ranks import RankPool
from tests.tables import each_row
from tests.tensor_parallel.meshes import HAND_WRITTEN


def check_in_pipeline(
    ranks: RankPool,
    mesh: str,
    choice: str,
    model: str,
    schedule: str = "1f1b",
    steps: Sequence[Split] | None = None,
    options: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    size, stages_per_rank = Mesh.parse(mesh), 2 if schedule == "interleaved" else 1
    steps = steps or [[[2, 1, 2, 1]] * size.data_size] * 2
    found = ranks.run(
        size.size, train_in_pipeline, mesh, choice, model, steps, schedule, stages_per_rank, "sgd", 0.5, options
    )
    wanted = oracle(model, steps, "sgd", 0.5)
    assert_parity([found[0]], wanted, 1e-6)
    module = build(model)
    module.load_state_dict(wanted["state"])
    with torch.no_grad():
        answer = module.eval()(**make_batch(model, 8, 7))
    for rank in found:
        assert rank["grad_norm"] == pytest.approx(found[0]["grad_norm"])
        assert rank["own_loss"] == pytest.approx(answer.loss.item(), rel=1e-5), "evaluation answers on every rank"
        torch.testing.assert_close(rank.pop("logits", answer.logits), answer.logits)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(ranks: RankPool, schedule: str) -> None:
    """On two, three and four stages; embeddings are tied but for the first."""
    for mesh, model in (("pp=2", "lm, long"), ("pp=3", "lm, long, gpt2"), ("pp=4", "lm, long, tied")):
        if schedule != "interleaved" or mesh != "pp=3":  # eight blocks make no six equal stages, but do make stages
            check_in_pipeline(ranks, mesh, "tp", model, schedule)


@pytest.mark.parametrize("choice", HAND_WRITTEN)
def test_with_ranks_that_see_different_samples(ranks: RankPool, choice: str) -> None:
    schedules = list(SCHEDULES)
    for turn, model in enumerate(("lm, long, tied", "lm, long, gpt2", "lm, long", "deep")):
        schedule = schedules[(HAND_WRITTEN.index(choice) + turn) % len(schedules)]
        for rank in check_in_pipeline(ranks, "dp=2,pp=2", choice, model, schedule):
            for held in rank["at_rest"]:
                share = 0.5 if choice == "zero3" else 1
                assert held / rank["whole"] == pytest.approx(share, rel=0.03), "sharded but for forward and backward"


@each_row(
    "mesh, choice, schedule, steps",
    [
        ("pp=4", "tp", "1f1b", [[[2]], [[1, 2]]]),  # fewer micro-batches than stages
        ("pp=3", "zero1", "zb-h1", [[[2]], [[1, 2]]]),
        ("pp=2", "tp", "interleaved", [[[2]], [[1, 2, 1]]]),  # no multiple of the ranks
        ("dp=2,pp=2", "zero3", "1f1b", [[[2, 1], [1]], [[1], [3]], [[2], []]]),  # uneven, and a rank without any
    ],
)
def test_uneven_micro_batches(ranks: RankPool, mesh: str, choice: str, schedule: str, steps: Sequence[Split]) -> None:
    check_in_pipeline(ranks, mesh, choice, "lm, long, tied", schedule, steps)


@each_row("choice, schedule", [("tp", "gpipe"), ("zero3", "interleaved"), ("zero1", "1f1b")])
def test_blocks_computed_again(ranks: RankPool, choice: str, schedule: str) -> None:
    check_in_pipeline(ranks, "dp=2,pp=2", choice, "lm, long", schedule, options={"activation_checkpointing": "block"})


def test_a_loss_in_chunks(ranks: RankPool) -> None:
    check_in_pipeline(ranks, "pp=2", "zero1", "lm, long, tied", "zb-h1", options={"loss_chunks": 2})


@each_row(
    "mesh, model, schedule",
    [
        ("pp=2", "deep", "gpipe"),
        ("pp=4", "lm, long", "1f1b"),
        ("pp=2", "lm, long", "interleaved"),
        ("pp=4", "deep", "zb-h1"),
    ],
)
def test_torchs_own_schedules(ranks: RankPool, mesh: str, model: str, schedule: str) -> None:
    """In two steps of other shapes."""
    check_in_pipeline(ranks, mesh, "pytorch_pp", model, schedule, [[[2, 2, 2, 2]], [[1] * 8]])
