"""Training with experts over ranks against one process: routing, losses, norms, gradients, parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensor_parallel
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh
from tests.models import MIXTURE, build, make_batch
from tests.parity import TOLERANCE, Split, assert_parity, global_batch, joined, oracle
from tests.pipeline_parallel.pipelines import strategy_in_pipeline
from tests.ranks import RankPool
from tests.tables import each_row
from tests.tensor_parallel.meshes import trained

ONE_EACH: list[Split] = [[[2], [1], [1], [2]], [[1], [2], [2], [1]], [[2], [2], [1], [1]]]
UNEVEN: list[Split] = [[[2, 1], [1], [1, 1], [2]], [[1], [2, 2], [], [1, 1]], [[2, 1], [2, 1], [1], []]]
"""For each of four ranks the micro-batches of three steps. Some have none."""


def routes(module: nn.Module) -> list[Tensor]:
    """Filled by each forward pass: for each layer the experts of each token, (tokens, k)."""
    seen: list[Tensor] = []
    for _, part in module.named_modules():
        if hasattr(part, "gate") and hasattr(part, "experts"):
            part.gate.register_forward_hook(lambda _, __, output: seen.append(output[2]))
    return seen


def train(mesh: str, choice: str, model: str, steps: list[Split], options: dict[str, Any]) -> dict[str, Any]:
    with strategy_in_pipeline(mesh, choice, model, **options) as strategy:
        seen = routes(strategy.module)
        result = trained(strategy, model, steps, clip=0.5)
        result["routes"] = seen[: len(seen) // len(steps)]
        cut = strategy.model_parallel.cuts if strategy.model_parallel else {}
        kept = {} if "parameters" in strategy.shards else dict(strategy.module.named_parameters())
        result["own_state"] = {name: one for name, one in kept.items() if name not in cut}
        with torch.no_grad():
            result["own_loss"] = strategy(**make_batch(model, 4, 7)).loss.item()
        strategy.module.train()
        strategy.zero_grad()
        strategy.load_full_state_dict(build(model).state_dict())
        strategy.forward_backward(global_batch(model, steps[0], 0)[strategy.data_parallel_rank])
        result["load"] = strategy.verdict.expert_load
        return result


def train_in(mesh: str, choice: str, model: str, steps: list[Split], options: dict[str, Any]) -> dict[str, Any]:
    """The same; on one rank each step is one batch."""
    with strategy_in_pipeline(mesh, choice, model, **options) as strategy:
        biases = {name: one.zero_() for name, one in strategy.module.named_buffers() if name.endswith("gate.bias")}
        strategy.load_full_state_dict(build(model).state_dict() | biases)
        result: dict[str, Any] = {"loss": [], "grad_norm": [], "norm": [], "load": [], "own_loss": 0, "own_state": {}}
        for index, split in enumerate(steps):
            strategy.zero_grad()
            batches = global_batch(model, split, index)
            own = [joined(batches)] if strategy.group_size == 1 else batches[strategy.data_parallel_rank]
            result["loss"].append(strategy.forward_backward(own).item())
            result["grad_norm"].append(strategy.verdict.loss_and_norm[1])
            result["load"].append(strategy.verdict.expert_load)
            result["norm"].append(strategy.clip_grad_norm_(0.5).item())
            result.setdefault("gradients", strategy.full_gradients())
            strategy.step()
        return result | {"state": strategy.full_state_dict()}


def check(ranks: RankPool, mesh: str, choice: str, model: str, steps: list[Split], options: dict[str, Any]) -> None:
    of, uneven = Mesh.parse(mesh), steps is UNEVEN
    steps = [split[: of.data_size] for split in steps]
    results = ranks.run(of.size, train, mesh, choice, model, steps, options)
    expected = oracle(model, steps, "sgd", 0.5)
    assert_parity(results, expected, TOLERANCE["sgd"])
    module = build(model)
    seen = routes(module)
    module(**joined(global_batch(model, steps[0], 0)))
    if not uneven:
        for layer, wanted in enumerate(seen):
            for tensor_rank in range(of.model_size):
                own = [result["routes"][layer] for result in results[tensor_rank :: of.model_size]]
                assert torch.equal(torch.cat(own), wanted), "tokens go to other experts than in one process"
    load = [torch.bincount(of_layer.flatten()).tolist() for of_layer in seen]
    assert all(result["load"] == (None if choice == "transformers_ep" else load) for result in results)
    module.load_state_dict(expected["state"])
    with torch.no_grad():
        answer = module.eval()(**make_batch(model, 4, 7))
    term = 0 if answer.aux_loss is None else MIXTURE["router_aux_loss_coef"] * answer.aux_loss
    assert abs(results[0]["own_loss"] - (answer.loss - term)) < 1e-4


@each_row(
    "mesh, choice, model, steps, options",
    [
        ("ep=2", "simple_ddp", "lm, qwen", ONE_EACH, {}),
        ("dp=2,ep=2", "simple_ddp", "lm, mixtral", ONE_EACH, {}),
        ("dp=2,ep=2", "tp", "lm, mixtral", UNEVEN, {"bucket_cap_mb": 0.01}),
        ("ep=4", "zero1", "lm, mixtral", UNEVEN, {}),
        ("dp=2,ep=2", "zero3", "lm, mixtral, no term", UNEVEN, {"activation_checkpointing": "block"}),
        ("ep=2,tp=2", "zero2", "lm, mixtral", UNEVEN, {"activation_checkpointing": "selective"}),
        ("ep=2,tp=2", "zero3", "lm, qwen3", ONE_EACH, {}),
    ],
)
def test_experts_over_ranks(
    ranks: RankPool, mesh: str, choice: str, model: str, steps: list[Split], options: dict[str, Any]
) -> None:
    check(ranks, mesh, choice, model, steps, options)


@pytest.mark.slow
@each_row(
    "mesh, choice, model, steps, options",
    [
        ("ep=2", "simple_ddp", "lm, mixtral", ONE_EACH, {}),
        ("dp=2,ep=2", "simple_ddp", "lm, mixtral", UNEVEN, {}),
        ("dp=2,ep=1", "zero2", "lm, mixtral", UNEVEN, {}),
        ("dp=2,ep=2", "zero2", "lm, qwen", ONE_EACH, {"activation_checkpointing": "block"}),
        ("dp=2,ep=2", "zero3", "lm, mixtral", ONE_EACH, {}),
        ("dp=2,ep=2", "zero3", "lm, mixtral", UNEVEN, {}),
        ("ep=2", "zero2", "lm, qwen3", ONE_EACH, {}),
        ("ep=2,tp=2", "simple_ddp", "lm, mixtral", ONE_EACH, {}),
        ("ep=2,tp=2", "tp", "lm, mixtral", UNEVEN, {"bucket_cap_mb": 0.01}),
        ("ep=2,tp=2", "zero1", "lm, qwen3", UNEVEN, {"activation_checkpointing": "block"}),
        ("ep=2,tp=2", "zero3", "lm, qwen", ONE_EACH, {}),
        ("dp=2,ep=1,tp=2", "zero3", "lm, mixtral", UNEVEN, {}),
    ],
)
def test_experts_over_ranks_in_more_ways(
    ranks: RankPool, mesh: str, choice: str, model: str, steps: list[Split], options: dict[str, Any]
) -> None:
    check(ranks, mesh, choice, model, steps, options)


@each_row("mesh, options", [("dp=2,ep=2", {}), ("ep=2", {"activation_checkpointing": "torch:block"})])
def test_transformers_own(ranks: RankPool, mesh: str, options: dict[str, Any]) -> None:
    check(ranks, mesh, "transformers_ep", "lm, mixtral, no term", UNEVEN, options)


BIASED = {"router_bias": 0.05, "router_scores": "sigmoid"}


@each_row(
    "mesh, choice, model, options",
    [
        ("ep=2", "zero3", "lm, qwen", {"router_scores": "sigmoid"}),
        ("dp=2,ep=2", "zero2", "lm, mixtral", {**BIASED, "activation_checkpointing": "block"}),
    ],
)
def test_what_models_do_not_have_is_the_same_on_one_rank(
    ranks: RankPool, mesh: str, choice: str, model: str, options: dict[str, Any]
) -> None:
    """Biases move, scores are of another kind."""
    size = Mesh.parse(mesh).size
    steps = [split[:size] for split in UNEVEN]
    results = ranks.run(size, train_in, mesh, choice, model, steps, options)
    (expected,) = ranks.run(1, train_in, "ep=1", "simple_ddp", model, steps, options)
    assert_parity(results, expected, TOLERANCE["sgd"])
    assert all(result["load"] == expected["load"] for result in results)
    for name, bias in expected["state"].items() if "router_bias" in options else ():
        if name.endswith("gate.bias"):
            assert set(bias.abs().div(0.05).round().tolist()) <= {0, 1, 2, 3} and bias.any()


def refused(mesh: str, choice: str, model: str) -> str:
    try:
        with strategy_in_pipeline(mesh, choice, model):
            return ""
    except UserError as error:
        return str(error)


@each_row(
    "mesh, choice, model, message",
    [
        ("ep=2", "zero1", "lm, llama", "LlamaForCausalLM has no experts that are known here"),
        ("ep=3", "zero1", "lm, mixtral", "model.layers.0.mlp has 8 experts; take an ep that divides them"),
    ],
)
def test_models_that_are_refused(ranks: RankPool, mesh: str, choice: str, model: str, message: str) -> None:
    for answer in ranks.run(Mesh.parse(mesh).size, refused, mesh, choice, model):
        assert message in answer


@each_row(
    "settings, message",
    [
        ({"mesh": "ep=2,pp=2"}, "ep goes with dp and tp alone so far"),
        ({"mesh": "shard=2,ep=2"}, "ep goes with dp and tp alone so far"),
        ({"mesh": "ep=2,tp=2", "sequence_parallel": True}, "must be without ep, whose routers see all tokens"),
        ({"mesh": "ep=2", "compress": "int8"}, "^--compress: must be without ep"),
        ({"mesh": "ep=2", "param_dtype": "bf16"}, "^--param-dtype: must be without ep"),
        ({"mesh": "ep=2", "loss_chunks": 2}, "^--loss-chunks: must be without ep"),
        ({"mesh": "dp=2", "router_bias": 0.1}, "^--router-bias: must be with --mesh and ep"),
        ({"mesh": "ep=2", "choice": "pytorch_tp"}, "take tp, simple_ddp, zero1, zero2 or zero3"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config = RunConfig.of(**{"choice": "simple_ddp"} | settings)
        tensor_parallel.load(config.choice).supports.require_mesh(Mesh.parse(str(config.mesh)))
