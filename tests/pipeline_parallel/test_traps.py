"""The silent errors of pipelines: what must be the same to the last bit, and what must differ."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.build import seed_everything
from tests.checkpoints import here
from tests.models import make_batch
from tests.parity import Case, assert_close, in_stages, one_step, strategy_of, trained
from tests.ranks import RankPool
from tests.tables import by_default, each_row
from tests.tensor_parallel.test_traps import overflowing

STAGES = [
    in_stages("tp", "pp=2", "deep", "gpipe", precision="fp16", loss_scale=1024.0),
    in_stages("tp", "pp=2", "deep", "zb-h1"),
    in_stages("tp", "pp=2", "deep, normed", "1f1b"),  # buffers see micro-batches in order
    in_stages("zero1", "pp=2", "deep, normed", "interleaved", activation_checkpointing="block"),  # each of those once
    in_stages("zero3", "pp=2", "deep", "interleaved", param_dtype="bf16"),  # micro-batches are added up in fp32
    in_stages("tp", "pp=4", "lm, long", "1f1b"),
    in_stages("zero2", "pp=2", "lm, long", "1f1b", precision="bf16"),
    in_stages("zero1", "pp=2", "lm, long", "zb-h1", param_dtype="bf16"),
]


@pytest.mark.parametrize("case", by_default(STAGES, *STAGES[:5]), ids=str)
def test_a_pipeline_is_one_process_to_the_last_bit(ranks: RankPool, case):
    """The process accumulates the same micro-batches in the same order. A weight of two stages would differ."""
    case = replace(case, split=[[[3, 2, 4]]] * 2, optimizer="adam")
    results = ranks.run(case.dims.size, trained, case)
    options = {name: value for name, value in case.options.items() if "stage" not in name and "pipeline" not in name}
    alone = replace(case, choice=case.choice.replace("tp", "baseline"), mesh="dp=1", options=options)
    (expected,) = ranks.run(1, trained, alone)
    assert results[0]["loss"] == expected["loss"]
    assert {rank["own_loss"] for rank in results} == {expected["own_loss"]}, "evaluation has the buffers of all stages"
    for key in ("gradients", "state"):
        assert results[0][key].keys() == expected[key].keys()
        different = [name for name, tensor in expected[key].items() if not torch.equal(tensor, results[0][key][name])]
        assert not different, f"{key}: {different}"


# Random numbers ------------------------------------------------------------------------------------------------------


def with_dropout(case: Case) -> dict[str, Tensor]:
    with strategy_of(case) as strategy:
        seed_everything(7, here(case.dims).drawing_rank)  # as a run
        for step in range(2):
            one_step(strategy, [make_batch(case.model, size, 10 * step + n) for n, size in enumerate((2, 1, 2))])
        return strategy.full_state_dict()


def test_each_micro_batch_has_random_numbers_of_its_own(ranks: RankPool):
    """A stage draws for one micro-batch after the other, whatever its schedule runs in between, and a block that is
    computed again draws what it drew."""
    case = in_stages("tp", "pp=2", "lm, long, gpt2, dropout", "gpipe")
    expected = ranks.run(2, with_dropout, case)[0]
    for schedule, blocks in (("1f1b", "none"), ("zb-h1", "none"), ("1f1b", "block")):
        options = {**case.options, "pipeline_schedule": schedule, "activation_checkpointing": blocks}
        assert_close(
            ranks.run(2, with_dropout, replace(case, options=options))[0], expected, 1e-6, f"{schedule} {blocks}"
        )
    (without,) = ranks.run(1, with_dropout, replace(case, choice="baseline", mesh="dp=1", options={}))
    with pytest.raises(AssertionError, match="is off by"):
        assert_close(without, expected, 1e-3, "the second stage draws as the first")


# Loss scaling --------------------------------------------------------------------------------------------------------


def overflowing_in_one_stage(choice: str, rank: int, layer: str) -> list[tuple[bool, float, bool]]:
    with strategy_of(in_stages(choice, "dp=2,pp=2", "deep", precision="fp16", loss_scale=16.0)) as strategy:
        return overflowing(strategy, "deep", layer if dist.get_rank() == rank else None)


@each_row("choice, rank, layer", [("tp", 3, "last"), ("zero3", 0, "blocks.0")])
def test_an_overflow_in_one_stage_skips_the_step_for_all(ranks: RankPool, choice, rank, layer):
    outcomes = ranks.run(4, overflowing_in_one_stage, choice, rank, layer)
    assert outcomes == [[(False, 16.0, False), (True, 8.0, True), (False, 8.0, False)]] * 4
