"""Balance by a router bias is the same on one rank; and what is refused. Parity is in `test_meshes.py`."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import tensor_parallel
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh
from tests.models import build
from tests.parity import TOLERANCE, Case, assert_close, batches_of, check, joined, one_step, strategy_of
from tests.ranks import RankPool
from tests.tables import each_row

BIASED = {"router_bias": 0.05, "router_scores": "sigmoid"}


def balanced(case: Case) -> tuple[list[float], list[Any], dict[str, Tensor]]:
    """Losses and loads of all steps, and the state after them. On one rank, each step is one batch."""
    alone, history = dist.get_world_size() == 1, ([], [])  # type: ignore[var-annotated]
    with strategy_of(replace(case, mesh="ep=1", choice="simple_ddp") if alone else case) as strategy:
        buffers = strategy.module.named_buffers()
        biases = {name: buffer.zero_() for name, buffer in buffers if name.endswith("gate.bias")}
        strategy.load_full_state_dict(build(case.model).state_dict() | biases)
        for index in range(len(case.steps)):
            batches = batches_of(case, index)
            local_batches = [joined(batches)] if alone else batches[strategy.data_parallel_rank]
            history[0].append(one_step(strategy, local_batches).item())
            history[1].append(strategy.verdict.expert_load)
        return *history, strategy.full_state_dict()


@each_row(
    "case",
    [
        Case("zero3", "lm, qwen", "ep=2", {"router_scores": "sigmoid"}, "some have none"),
        Case("zero2", "lm, mixtral", "dp=2,ep=2", {**BIASED, "activation_checkpointing": "block"}, "some have none"),
    ],
)
def test_what_models_do_not_have_is_the_same_on_one_rank(ranks: RankPool, case):
    """Biases move, scores are of another kind."""
    losses, loads, state = ranks.run(case.dims.size, balanced, case)[0]
    ((expected_losses, expected_loads, expected),) = ranks.run(1, balanced, case)
    assert losses == pytest.approx(expected_losses, rel=1e-5) and loads == expected_loads
    assert_close(state, expected, TOLERANCE["sgd"], "state")
    for name, bias in expected.items() if "router_bias" in case.options else ():
        if name.endswith("gate.bias"):
            assert set(bias.abs().div(0.05).round().tolist()) <= set(range(len(losses) + 1)) and bias.any()


@each_row(
    "mesh, model, message",
    [
        ("ep=2", "lm, llama", "LlamaForCausalLM has no experts that are known here"),
        ("ep=3", "lm, mixtral", "model.layers.0.mlp has 8 experts; take an ep that divides them"),
    ],
)
def test_models_that_are_refused(ranks: RankPool, mesh, model, message):
    check(ranks, Case("zero1", model, mesh, refused=message))


@each_row(
    "settings, message",
    [
        ({"mesh": "ep=2,pp=2"}, "ep goes with dp and tp alone so far"),
        ({"mesh": "shard=2,ep=2"}, "ep goes with dp and tp alone so far"),
        ({"mesh": "ep=2,tp=2", "sequence_parallel": True}, "must be without ep, whose routers see all tokens"),
        ({"mesh": "ep=2", "compress": "int8"}, "--compress int8: must be without ep"),
        ({"mesh": "ep=2", "loss_chunks": 2}, "must be without ep"),
        ({"mesh": "dp=2", "router_bias": 0.1}, "must be with --mesh and ep"),
        ({"mesh": "ep=2", "choice": "pytorch_tp"}, "take tp, simple_ddp, zero1, zero2 or zero3"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(UserError, match=message):
        config = RunConfig.of(**{"choice": "simple_ddp"} | settings)
        tensor_parallel.load(config.choice).supports.require_mesh(Mesh.parse(str(config.mesh)))
