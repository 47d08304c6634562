"""What cannot be cut into stages, or trained so, is refused by name."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import T5Config, T5Model

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.mesh import PIPELINE_SCHEDULES
from pipeline_parallel.parallelize import split_of
from pipeline_parallel.partition import chain_of, cut_by_cost, partition, stages_of
from pipeline_parallel.schedules import SCHEDULES
from pipeline_parallel.tied import shared_of
from tests.models import build
from tests.parity import check, in_stages
from tests.ranks import RankPool
from tests.tables import each_row


@each_row(
    "flags, message",
    [
        ({"mesh": "dp=2", "pipeline_schedule": "gpipe"}, "must be with --mesh and pp above 1"),
        ({"mesh": "pp=2", "pipeline_schedule": "interleaved"}, "must be with --stages-per-rank of at least 2"),
        (
            {"mesh": "pp=2", "pipeline_schedule": "zb-h1", "activation_checkpointing": "block"},
            "must be without --activation-checkpointing, since a block",
        ),
        ({"mesh": "pp=2", "compile": True}, "^--compile: must be without pp"),
        ({"mesh": "pp=2", "lora_rank": 2}, "^--lora-rank 2: must be without pp"),
    ],
)
def test_flags(flags, message):
    with pytest.raises(UserError, match=message):
        RunConfig.of(choice="tp", **flags)


def test_models_and_splits():
    with pytest.raises(UserError, match="Tied has no blocks"):
        chain_of(build("tied"))
    with pytest.raises(UserError, match="decoder needs what the encoder makes"):
        partition(T5Model(T5Config(d_model=4, d_ff=4, d_kv=2, num_heads=2, vocab_size=8, num_layers=2)), 2)
    two_lists = nn.ModuleDict({n: nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for n in ("encoder", "decoder")})
    with pytest.raises(UserError, match=r"several lists \(encoder, decoder\)"):
        chain_of(two_lists)
    chain, are_blocks = chain_of(build("deep"))
    with pytest.raises(UserError, match="6 blocks cannot be cut into 8 stages"):
        cut_by_cost([1] * len(chain), are_blocks, 8)
    with pytest.raises(UserError, match=r"--pipeline-split 4,1: 2 stages of 5 blocks, but the model has 6"):
        stages_of(are_blocks, [4, 1])
    with pytest.raises(UserError, match="such as 4,6,6,4"):
        split_of(RunConfig.of(choice="tp", mesh="pp=2", pipeline_split="4;2"))
    for split, message in (
        ([["first", "blocks.*"]], "1 stages are given, but the mesh has 2"),
        ([["first", "blocks.0"], ["blocks.*", "blocks.3"]], '"blocks.3" of stage 1 matches no module that is in none'),
        ([["first", "blocks.0"], ["blocks", "last"]], '"blocks" of stage 1 matches no module'),
        ([["first"], ["blocks.*"]], "last.weight is in no module that a stage could hold"),
    ):
        with pytest.raises(UserError, match=message):
            partition(build("deep"), 2, split)
    module = build("deep")
    module.first = nn.BatchNorm1d(6, affine=False)  # buffers make a module part of a stage
    assert partition(module, 2)[0][0][0] == "first"
    module.register_buffer("count", torch.zeros(1))
    with pytest.raises(UserError, match="count is in no module that a stage could hold"):
        partition(module, 2)
    chain[1][1][0].weight = chain[4][1][0].weight  # type: ignore[index]
    with pytest.raises(UserError, match="untie it"):
        shared_of(chain, stages_of(are_blocks, [2, 2, 2]))
    assert tuple(SCHEDULES) == PIPELINE_SCHEDULES


def test_the_slowest_stage_is_as_fast_as_it_can_be():
    """A head that costs two blocks takes the place of two."""
    assert cut_by_cost([0, 1, 1, 1, 1, 1, 1, 2], [False, *[True] * 6, False], 4) == [1, 2, 2, 1]
    assert cut_by_cost([0, 1, 1, 1, 1, 1, 1, 0], [False, *[True] * 6, False], 3) == [2, 2, 2]


def test_a_plan_lists_the_modules_of_each_stage(tmp_path):
    plan = tmp_path / "plan.toml"
    config = RunConfig.of(choice="tp", mesh="pp=2", plan=str(plan))
    plan.write_text('stages = [["first", "blocks.0"], ["blocks.*", "last"]]')
    assert split_of(config) == [["first", "blocks.0"], ["blocks.*", "last"]]
    chain, places = partition(build("deep"), 2, split_of(config))
    assert [name for name, _ in chain] == ["first", *(f"blocks.{n}" for n in range(6)), "last"]
    assert places == [0, 0, 1, 1, 1, 1, 1, 1]
    for text in ("", 'stages = ["first"]'):
        plan.write_text(text)
        with pytest.raises(UserError, match=r"stages: Expected `array`, got .*; write for example stages ="):
            split_of(config)


@each_row(
    "schedule, model, split, message",
    [
        ("1f1b", "lm, long", [2, 1], "micro-batches of one shape alone"),
        ("1f1b", "deep", [2], "torch says: Number of microbatches (1) must be greater than or equal to the number"),
        ("zb-h1", "deep", [1] * 5, "torch says: Zero bubble requires the number of microbatches to be a multiple"),
        ("gpipe", "lm, long, tied", [2, 2], "lm_head.weight and model.embed_tokens.weight: torch's stages share no"),
    ],
)
def test_torchs_own_schedules(ranks: RankPool, schedule, model, split, message):
    case = in_stages("pytorch_pp", "pp=2", model, schedule)
    check(ranks, replace(case, split=[[split]], refused=message))
