"""The silent errors of pipelines: what must be the same to the last bit, and what must differ."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.build import seed_everything
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.mesh import Mesh
from pipeline_parallel.partition import chain_of, costs_of, cut_by_cost
from tests.models import build, make_batch
from tests.parity import OPTIMIZERS, Split, assert_close, load, one_step, options_of, train_on_rank
from tests.pipeline_parallel.pipelines import CPU, strategy_in_pipeline, train_in_pipeline
from tests.ranks import RankPool
from tests.tables import each_row
from tests.tensor_parallel.test_traps import overflowing

STEPS: list[Split] = [[[3, 2, 4]]] * 2
DROPOUT = "lm, long, gpt2, dropout"


def family(choice: str) -> tuple[str, str]:
    return {"tp": ("ddp", "bucket_ddp_async"), "simple_ddp": ("ddp", "simple_ddp")}.get(choice, ("sharding", choice))


@each_row(
    "ranks_of_pp, choice, schedule, model, options",
    [
        (2, "tp", "gpipe", "lm, long", {}),
        (4, "tp", "1f1b", "lm, long", {}),
        (2, "tp", "interleaved", "lm, long", {}),
        (2, "tp", "zb-h1", "lm, long", {}),
        (2, "tp", "zb-h1", "deep", {}),
        (2, "tp", "1f1b", "deep, normed", {}),  # buffers see micro-batches in order
        (2, "zero1", "interleaved", "deep, normed", {"activation_checkpointing": "block"}),  # and see each of them once
        (2, "zero2", "1f1b", "lm, long", {"precision": "bf16"}),
        (2, "tp", "gpipe", "lm, long", {"precision": "fp16", "loss_scale": 1024.0}),
        (2, "zero3", "interleaved", "lm, long", {"param_dtype": "bf16"}),  # micro-batches are added up in fp32
        (2, "zero1", "zb-h1", "lm, long", {"param_dtype": "bf16"}),
    ],
)
def test_a_pipeline_is_one_process_to_the_last_bit(
    ranks: RankPool, ranks_of_pp: int, choice: str, schedule: str, model: str, options: dict[str, Any]
) -> None:
    """One that accumulates the same micro-batches: each sum is in their order. (But for a weight of two stages.)"""
    stages = 2 if schedule == "interleaved" else 1
    arguments = (choice, model, STEPS, schedule, stages, "adam", None, options)
    found = ranks.run(ranks_of_pp, train_in_pipeline, f"pp={ranks_of_pp}", *arguments)
    (wanted,) = ranks.run(1, train_on_rank, family(choice), model, STEPS, "adam", None, False, options)
    assert found[0]["loss"] == wanted["loss"]
    assert {rank["own_loss"] for rank in found} == {wanted["own_loss"]}, "evaluation has the buffers of all stages"
    for what in ("gradients", "state"):
        assert found[0][what].keys() == wanted[what].keys()
        different = [name for name, tensor in wanted[what].items() if not torch.equal(tensor, found[0][what][name])]
        assert not different, f"{what}: {different}"


def initial_state(mesh: str, schedule: str, stages_per_rank: int) -> dict[str, Tensor]:
    with strategy_in_pipeline(mesh, "zero1", "lm, long, tied", schedule, stages_per_rank) as strategy:
        return strategy.full_state_dict()


def test_weights_do_not_depend_on_the_number_of_stages(ranks: RankPool) -> None:
    """Nor do two layers begin alike."""
    wanted = build("lm, long, tied", seed=0).state_dict()
    for mesh, schedule, stages_per_rank in (("pp=2", "1f1b", 1), ("pp=2", "interleaved", 2), ("dp=2,pp=2", "gpipe", 1)):
        found = ranks.run(4 if "dp" in mesh else 2, initial_state, mesh, schedule, stages_per_rank)[0]
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not torch.equal(wanted["model.layers.0.mlp.up_proj.weight"], wanted["model.layers.4.mlp.up_proj.weight"])


# Targets that are masked ---------------------------------------------------------------------------------------------


def masked_batch(samples: int, targets: int, seed: int) -> dict[str, Tensor]:
    """Sequences of 7 tokens that begin with padding. Only the last `targets` tokens of each have a loss."""
    batch = make_batch("lm", samples, seed)
    labels = batch["labels"].clone()
    labels[:, : 7 - targets] = -100
    mask = torch.ones_like(labels)
    mask[::2, :2] = 0
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}


TARGETS = [[(2, 1), (1, 5), (2, 0)], [(3, 2), (1, 6)]]
"""Of each data-parallel rank, the samples of each micro-batch, and targets of each sample."""


def train_on_masked(mesh: str, choice: str, schedule: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    with strategy_in_pipeline(mesh, choice, "lm, long", schedule) as strategy:
        given = TARGETS[strategy.data_parallel_rank]
        batches = [masked_batch(*one, seed) for seed, one in enumerate(given, 10 * strategy.data_parallel_rank)]
        loss = strategy.forward_backward(batches, [samples * targets for samples, targets in given]).item()
        gradients = strategy.full_gradients()
        strategy.step()
        return loss, gradients, strategy.full_state_dict()


@each_row("choice, schedule", [("tp", "1f1b"), ("zero3", "gpipe"), ("zero1", "zb-h1")])
def test_the_loss_is_the_mean_over_all_targets(ranks: RankPool, choice: str, schedule: str) -> None:
    """Of the global batch: micro-batches have unequal numbers of them, one has none."""
    module = build("lm, long")
    given = [masked_batch(*one, 10 * rank + n) for rank, of_rank in enumerate(TARGETS) for n, one in enumerate(of_rank)]
    wanted = module(**{name: torch.cat([one[name] for one in given]) for name in given[0]}).loss
    wanted.backward()
    loss, gradients, _ = ranks.run(4, train_on_masked, "dp=2,pp=2", choice, schedule)[0]
    assert loss == pytest.approx(wanted.item(), rel=1e-6)
    assert_close(gradients, {name: p.grad for name, p in module.named_parameters()}, 1e-6, "gradient")


# Random numbers ------------------------------------------------------------------------------------------------------


def batches_of(step: int) -> list[dict[str, Tensor]]:
    return [make_batch(DROPOUT, samples, 10 * step + n) for n, samples in enumerate((2, 1, 2))]


def drop_in_pipeline(mesh: str, choice: str, schedule: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """The state after two steps, in which each rank draws its own random numbers."""
    stages_per_rank = 2 if schedule == "interleaved" else 1
    with strategy_in_pipeline(mesh, choice, DROPOUT, schedule, stages_per_rank, **options) as strategy:
        groups: Any = SimpleNamespace(mesh=Mesh.parse(mesh))
        seed_everything(7, Ranks(dist.get_rank(), dist.get_world_size(), CPU, "gloo", groups).drawing_rank)  # as a run
        for step in range(2):
            one_step(strategy, batches_of(step))
        return strategy.full_state_dict()


def drop_alone(choice: str, stages: int) -> dict[str, Tensor]:
    """The same in one process, which changes from generator to generator where a stage ends."""
    module = build(DROPOUT)
    chain, are_blocks = chain_of(module)
    split = cut_by_cost(costs_of(chain), are_blocks, stages)
    states: dict[int, Tensor] = {}
    current = 0

    def change_to(stage: int, given: tuple[Tensor, ...]) -> None:
        nonlocal current
        states[current], current = torch.get_rng_state(), stage
        torch.set_rng_state(states[stage])
        if stage:  # the dropout in front of all blocks has no parameters, so no stage of its own, and all draw for it
            module.transformer.drop(given[0])  # type: ignore[operator,union-attr]

    for stage in reversed(range(stages)):
        seed_everything(7, stage)
        states[stage] = torch.get_rng_state()
    firsts = [module, *(module.transformer.h[first] for first in accumulate(split[:-1]))]  # type: ignore[index,union-attr]
    for stage, part in enumerate(firsts):
        part.register_forward_pre_hook(lambda _, given, stage=stage: change_to(stage, given))
    strategy = load(family(choice))(module, OPTIMIZERS["sgd"], options_of(family(choice)))
    for step in range(2):
        one_step(strategy, batches_of(step))
    return strategy.full_state_dict()


@each_row("ranks_of_pp, choice, schedule", [(2, "tp", "gpipe"), (4, "zero1", "1f1b"), (2, "zero3", "zb-h1")])
def test_each_micro_batch_has_random_numbers_of_its_own_in_each_stage(
    ranks: RankPool, ranks_of_pp: int, choice: str, schedule: str
) -> None:
    """A stage draws for one micro-batch after the other, whatever its schedule runs in between."""
    found = ranks.run(ranks_of_pp, drop_in_pipeline, f"pp={ranks_of_pp}", choice, schedule, {})[0]
    (wanted,) = ranks.run(1, drop_alone, choice, ranks_of_pp)
    assert_close(found, wanted, 1e-6, "parameter")


@each_row("choice, schedule", [("tp", "gpipe"), ("zero3", "1f1b"), ("zero1", "interleaved")])
def test_blocks_computed_again_have_the_same_random_numbers(ranks: RankPool, choice: str, schedule: str) -> None:
    once, again = (
        ranks.run(2, drop_in_pipeline, "pp=2", choice, schedule, {"activation_checkpointing": blocks})[0]
        for blocks in ("none", "block")
    )
    assert all(torch.equal(again[name], tensor) for name, tensor in once.items())


# Loss scaling --------------------------------------------------------------------------------------------------------


def overflowing_in_one_stage(choice: str, rank: int, layer: str) -> list[tuple[bool, float, bool]]:
    with strategy_in_pipeline("dp=2,pp=2", choice, "deep", precision="fp16", loss_scale=16.0) as strategy:
        return overflowing(strategy, "deep", layer if dist.get_rank() == rank else None)


@each_row("choice, rank, layer", [("tp", 3, "last"), ("zero3", 0, "blocks.0")])
def test_an_overflow_in_one_stage_skips_the_step_for_all(ranks: RankPool, choice: str, rank: int, layer: str) -> None:
    found = ranks.run(4, overflowing_in_one_stage, choice, rank, layer)
    assert found == [[(False, 16.0, False), (True, 8.0, True), (False, 8.0, False)]] * 4
