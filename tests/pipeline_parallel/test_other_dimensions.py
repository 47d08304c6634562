"""Stages whose layers are cut over `tp`, or whose states are sharded over a part of the ranks."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensor_parallel
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh
from pipeline_parallel.schedules import SCHEDULES
from tests.models import build, make_batch
from tests.parity import Split
from tests.pipeline_parallel.pipelines import strategy_in_pipeline
from tests.pipeline_parallel.test_parity import check_in_pipeline
from tests.ranks import RankPool
from tests.tables import each_row
from tests.tensor_parallel.meshes import HAND_WRITTEN
from tests.traffic import announced, counted_step

MESHES = ("pp=2,tp=2", "dp=2,pp=2,tp=2", "replicate=2,shard=2,pp=2")
WHOLE, CUT = {"sequence_parallel": False}, {"sequence_parallel": True}
AGAIN = {**CUT, "activation_checkpointing": "block"}


@each_row(
    "mesh, choice, model, schedule, options",
    [
        ("dp=2,pp=2,tp=2", "zero1", "lm, llama", "zb-h1", CUT),
        ("dp=2,pp=2,tp=2", "zero2", "lm, gpt2", "1f1b", AGAIN),
        ("dp=2,pp=2,tp=2", "tp", "lm, gqa", "gpipe", WHOLE),
        ("replicate=2,shard=2,pp=2", "zero3", "lm, long, gpt2", "interleaved", {}),
    ],
)
def test_eight_ranks(
    ranks: RankPool, mesh: str, choice: str, model: str, schedule: str, options: dict[str, Any]
) -> None:
    steps: list[Split] = [[[2, 1, 2, 1]] * Mesh.parse(mesh).data_size]
    for rank in check_in_pipeline(ranks, mesh, choice, model, schedule, steps, options):
        for held in rank["at_rest"]:
            assert held / rank["whole"] == pytest.approx(0.5 if choice == "zero3" else 1, rel=0.03)


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", HAND_WRITTEN)
@pytest.mark.parametrize("mesh", MESHES)
def test_all_of_them(ranks: RankPool, mesh: str, choice: str) -> None:
    """Eight layers with shared keys and values are rounded by tp alone as much as is allowed, so these are two."""
    model = ("lm, long", "lm, gqa", "lm, long, gpt2")[(MESHES.index(mesh) + HAND_WRITTEN.index(choice)) % 3]
    ways = (WHOLE, CUT, AGAIN) if "tp" in mesh else ({},)
    for schedule, way in product(SCHEDULES, ways):
        cannot = (schedule, way) == ("zb-h1", AGAIN) or (schedule, model) == ("interleaved", "lm, gqa")
        if not cannot and not ("replicate" in mesh and choice in ("tp", "simple_ddp")):
            check_in_pipeline(ranks, mesh, choice, model, schedule, options=way)


def one_step(choice: str, model: str, schedule: str, options: dict[str, Any]) -> Any:
    """Announced, and issued in all groups."""
    per_rank = 2 if schedule == "interleaved" else 1
    with strategy_in_pipeline("dp=2,pp=2,tp=2", choice, model, schedule, per_rank, **options) as strategy:
        for _ in range(2):
            issued = counted_step(strategy, [make_batch(model, 3, seed) for seed in range(2)])
        return announced(strategy, 2, clips=True), issued


@each_row(
    "choice, model, schedule, options",
    [
        ("tp", "lm, long, tied", "1f1b", WHOLE),
        ("zero3", "lm, long, gpt2", "interleaved", CUT),
        ("zero1", "lm, long", "1f1b", AGAIN),
        ("zero1", "lm, long", "1f1b", {"activation_checkpointing": "every:3"}),
    ],
)
def test_each_stage_announces_its_own(
    ranks: RankPool, choice: str, model: str, schedule: str, options: dict[str, Any]
) -> None:
    for wanted, issued in ranks.run(8, one_step, choice, model, schedule, options):
        assert issued == wanted


def with_dropout(options: dict[str, Any]) -> Any:
    """Gradients of what all ranks of tp hold, with the state of random numbers; and on rank 0 all whole gradients."""
    model = "lm, gpt2, dropout"
    with strategy_in_pipeline("pp=2,tp=2", "tp", model, **options) as strategy:
        strategy.load_full_state_dict(build(model).state_dict() if dist.get_rank() == 0 else {})
        assert strategy.model_parallel is not None
        torch.manual_seed(dist.get_rank() // 2)
        strategy.forward_backward([make_batch(model, samples, samples) for samples in (2, 1, 3)])
        cuts, named = strategy.model_parallel.cuts, strategy.module.named_parameters()
        alike = {n: p.grad.clone() for n, p in named if n not in cuts and p.grad is not None}
        return alike | {"random numbers": torch.get_rng_state()}, strategy.full_gradients()


@each_row("way", [WHOLE, CUT])
def test_dropout(ranks: RankPool, way: dict[str, Any]) -> None:
    """Ranks of one stage draw alike what all of them compute, and a block that runs again draws what it drew."""
    plain = ranks.run(4, with_dropout, way)
    for first in (0, 2):
        assert len(plain[first][0]) > 1
        for name, gradient in plain[first][0].items():
            assert torch.equal(gradient, plain[first + 1][0][name]), name
    again = ranks.run(4, with_dropout, {**way, "activation_checkpointing": "block"})
    for name, gradient in plain[0][1].items():
        torch.testing.assert_close(again[0][1][name], gradient)


@each_row("choice", ["pytorch_tp", "pytorch_fsdp_tp"])
def test_torchs_own_cut_neither_stages_nor_tokens(choice: str) -> None:
    for mesh in ("pp=2,tp=2", "cp=2,tp=2"):
        with pytest.raises(UserError, match="--mesh with pp or cp: PyTorch's tensor parallelism cuts neither"):
            tensor_parallel.load(choice).supports.require_mesh(Mesh.parse(mesh))
