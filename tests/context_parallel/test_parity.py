"""Training on parts of the tokens against one process: losses, norms, gradients, parameters; and what it answers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.sweep.meshes import mesh_flags
from tests.models import build, make_batch
from tests.parity import TOLERANCE, assert_parity, oracle
from tests.pipeline_parallel.pipelines import strategy_in_pipeline
from tests.ranks import RankPool
from tests.tables import each_row
from tests.tensor_parallel.meshes import trained

RING, ULYSSES, PYTORCH = ({"context_parallel": way} for way in ("ring", "ulysses", "pytorch_cp"))
STEPS = [[[2, 1], [1]], [[1], [2, 2]], [[2, 1], [2, 1]]]
"""Uneven: for each of two ranks that see different samples, the micro-batches of three steps."""


def train(mesh: str, choice: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
    with strategy_in_pipeline(mesh, choice, model, **options) as strategy:
        steps = [split[: strategy.data_parallel_size] for split in STEPS]
        result = trained(strategy, model, steps, clip=0.5)
        whole = "parameters" not in strategy.shards and Mesh.parse(mesh).model_size == Mesh.parse(mesh).degree("cp")
        result["own_state"] = dict(strategy.module.named_parameters()) if whole else {}
        batch = make_batch(model, 4, 7)
        with torch.no_grad():
            loss = strategy(**batch).loss
            dist.all_reduce(loss, dist.ReduceOp.AVG, strategy.process_group)
            del batch["labels"]
            result["own_loss"], result["logits"] = loss.item(), strategy(**batch).logits
        return result


def check(ranks: RankPool, mesh: str, choice: str, model: str, options: dict[str, Any]) -> None:
    size = Mesh.parse(mesh)
    results = ranks.run(size.size, train, mesh, choice, model, options)
    expected = oracle(model, [split[: size.data_size] for split in STEPS], "sgd", 0.5)
    assert_parity(results, expected, TOLERANCE["sgd"])
    module = build(model).eval()
    module.load_state_dict(expected["state"])
    batch = make_batch(model, 4, 7)
    with torch.no_grad():
        answer = module(**batch)
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 1
    for result in results:
        assert abs(result["own_loss"] - answer.loss) < 1e-4
        torch.testing.assert_close(result["logits"][seen], answer.logits[seen], atol=1e-3, rtol=0)


@each_row(
    "mesh, choice, model, options",
    [
        ("cp=2", "tp", "lm, llama", {}),
        ("cp=3", "simple_ddp", "lm, gqa", RING),
        ("cp=4", "zero1", "lm, gqa, documents", {}),
        ("dp=2,cp=2", "zero2", "lm, gpt2, padded", {}),
        ("dp=2,cp=2", "zero3", "lm, gqa, documents", ULYSSES),
        ("cp=2,tp=2", "zero1", "lm, gqa, documents", RING),
        ("cp=2,tp=2", "zero3", "lm, llama", ULYSSES),
        ("pp=2,cp=2", "tp", "lm, llama", {}),
        ("replicate=2,shard=1,cp=2", "zero3", "lm, llama", {}),
        ("cp=2", "zero1", "lm, gqa, documents", {"activation_checkpointing": "selective"}),
        ("cp=2", "zero3", "lm, gqa", {"activation_checkpointing": "block"}),
        ("cp=2", "zero2", "lm, llama", ULYSSES | {"activation_checkpointing": "op"}),
        ("cp=2", "tp", "lm, llama", {"activation_checkpointing": "torch:block"}),
        ("cp=2", "zero1", "lm, gqa, documents", PYTORCH | {"activation_checkpointing": "block"}),
        ("cp=3", "zero3", "lm, llama", PYTORCH),
        ("dp=2,cp=2", "tp", "lm, gpt2, padded", PYTORCH),
        ("cp=2", "zero1", "lm, qwen2", {}),
        ("cp=3", "simple_ddp", "lm, qwen2", ULYSSES),
    ],
)
def test_tokens_over_ranks(ranks: RankPool, mesh: str, choice: str, model: str, options: dict[str, Any]) -> None:
    check(ranks, mesh, choice, model, options)


def refused(model: str, options: dict[str, Any]) -> str:
    try:
        with strategy_in_pipeline("cp=2", "tp", model, **options) as strategy:
            strategy.forward_backward([make_batch(model, 2, 0)])
            return ""
    except UserError as error:
        return str(error)


@each_row(
    "ranks_of_cp, model, options, message",
    [
        (2, "llama", {}, "is no causal language model of transformers"),
        (2, "plain", {}, "Plain is no causal language model"),
        (2, "lm, gpt2, dropout", ULYSSES, ""),
        (2, "lm, gpt2, dropout", PYTORCH, "context parallelism by pytorch_cp draws no dropout within attention"),
        (2, "lm, gpt2, dropout", {}, "by zigzag draws no dropout within attention (here 0.3): set it to 0"),
        (2, "lm, qwen2, window", {}, "Qwen2Attention uses sliding_window, which no ring does here"),
    ],
)
def test_what_is_refused(ranks: RankPool, ranks_of_cp: int, model: str, options: dict[str, Any], message: str) -> None:
    for answer in ranks.run(ranks_of_cp, refused, model, options):
        assert message in answer and bool(message) == bool(answer)


@each_row(
    "settings, message",
    [
        ({"mesh": "dp=2", **RING}, "must be with --mesh and cp above 1"),
        ({"mesh": "cp=2", "link": "1gbit", **PYTORCH}, "must be none with ep and --context-parallel pytorch_cp"),
        ({"mesh": "ep=2", "link": "1gbit"}, "must be none with ep and --context-parallel pytorch_cp"),
        ({"mesh": "cp=2", "loss_chunks": 2}, "must be without tp and cp"),
        ({"mesh": "cp=2", "compile": True}, "must be without tp and cp"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RunConfig.of(choice="tp", **settings)


def test_a_label_says_how_tokens_are_cut() -> None:
    config = RunConfig.of(choice="tp", mesh="dp=2,cp=2", **ULYSSES)
    assert config.label == "tp@dp2-cp2-ulysses"
    assert mesh_flags("dp2-cp2-ulysses") == ["--mesh", "dp=2,cp=2", "--context-parallel", "ulysses"]
    assert mesh_flags("cp2-pytorch_cp") == ["--mesh", "cp=2", "--context-parallel", "pytorch_cp"]
