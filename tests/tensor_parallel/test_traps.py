"""The silent errors of tensor parallelism: what must be the same on all ranks, what must differ, what counts once."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ddp_lab.runtime.build import seed_everything
from ddp_lab.runtime.errors import NonFiniteError, UnsupportedError
from ddp_lab.runtime.mesh import Mesh, mesh_groups
from ddp_lab.strategy.strategy import Strategy
from tensor_parallel.cross_entropy import VocabularyParallelCrossEntropy
from tensor_parallel.cuts import cut_evenly
from tensor_parallel.parallelize import parallelize
from tensor_parallel.plan import Column, Region, Row, plan_of
from tests.models import DEVICE, build, make_batch
from tests.parity import Case, message_of, one_step, strategy_of
from tests.ranks import RankPool
from tests.tables import each_row


def threads_once_ended(expected: int) -> int:
    """The number of this process's threads. /proc lists threads that have just ended: waits until there are no more
    than `expected`, for 10 s at most."""
    until = time.monotonic() + 10
    while (threads := len(list(Path("/proc/self/task").iterdir()))) > expected and time.monotonic() < until:
        time.sleep(0.01)
    return threads


def threads_behind_meshes(choice: str) -> list[int]:
    """The number of this process's threads after each of three meshes, on which a strategy takes a step, is closed."""
    counts: list[int] = []
    for _ in range(3):
        with strategy_of(
            Case(choice, mesh="replicate=2,shard=1,tp=2" if choice == "zero3" else "dp=2,tp=2")
        ) as strategy:
            one_step(strategy, [make_batch("plain", 2, 0)])
        counts.append(threads_once_ended(min(counts[1:], default=1000)))
    return counts


@each_row("choice", ["tp", "zero3"])
def test_groups_end_with_their_mesh(ranks: RankPool, choice):
    """Each has threads of its own over Gloo; the latest mesh's end with the caller's variables."""
    for threads in ranks.run(4, threads_behind_meshes, choice):
        assert threads[2] <= threads[1], threads


def break_a_gradient(choice: str) -> str:
    """This rank's error when rank 1 of dp=2,tp=2 alone has a NaN in a gradient."""
    with strategy_of(Case(choice, "lm, llama", "dp=2,tp=2")) as strategy:
        if dist.get_rank() == 1:
            name = "model.layers.1.mlp.up_proj.weight"
            strategy.trainable[name].register_hook(lambda gradient: gradient * float("nan"))
        return message_of(NonFiniteError, one_step, strategy, [make_batch("lm, llama", 2, 0)])


@each_row("choice", ["tp", "zero3"])
def test_a_gradient_that_is_not_finite_stops_every_rank(ranks: RankPool, choice):
    """Although no other rank has that part of the model, and its replica's gradient is finite."""
    for message in ranks.run(4, break_a_gradient, choice):
        assert "step 0: a gradient is not finite on rank 1;" in message
        assert "no update came before it" in message and "lower --lr" not in message


def draw(sequence_parallel: bool) -> dict[str, Any]:
    """Which elements dropout keeps, and the generator's state within a region and after the step."""
    with strategy_of(
        Case("tp", "lm, gpt2, dropout", "dp=2,tp=2", {"sequence_parallel": sequence_parallel})
    ) as strategy:
        seed_everything(7, strategy.data_parallel_rank)  # as the runner: the same for ranks with the same samples
        draws: dict[str, Any] = {}

        def keep(name: str):
            def hook(module, args, output: torch.Tensor):
                draws.setdefault(name, (output != 0).flatten(0, -2))

            return hook

        def keep_state(*_):
            draws.setdefault("inside", torch.get_rng_state())

        body = strategy.module.transformer
        body.drop.register_forward_hook(keep("embedding"))
        body.h[0].mlp.dropout.register_forward_hook(keep("between"))
        body.h[0].attn.c_attn.register_forward_hook(keep_state)
        strategy.module.train()
        one_step(strategy, [make_batch("lm, gpt2, dropout", 2, 0)])
        draws["after"] = torch.get_rng_state()
        return draws


@each_row("sequence_parallel", [False, True])
def test_dropout(ranks: RankPool, sequence_parallel):
    """Ranks of one model have the same masks where they compute the same, and different ones for their own heads or
    tokens. Afterwards their generators are in the same state. Ranks with other samples differ everywhere."""
    first, second, *replicas = ranks.run(4, draw, sequence_parallel)
    assert not any(torch.equal(first[name], replica[name]) for name in first for replica in replicas)
    assert torch.equal(first["embedding"], second["embedding"])
    assert torch.equal(first["between"], second["between"]) is not sequence_parallel
    assert not torch.equal(first["inside"], second["inside"])
    assert torch.equal(first["after"], second["after"])


def cross_entropy(scale: float, dtype: torch.dtype, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """Loss and gradient: of cut logits on this rank, and torch's of the full logits. In turn: loss, loss, gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(9, vocabulary, generator=generator) * scale).to(dtype)
    targets = torch.randint(vocabulary, (9,), generator=generator)
    targets[2] = -100
    ((first, end),) = cut_evenly("head", "entries", vocabulary, 1, size).ranges[rank]
    part, full = logits[:, first:end].clone().requires_grad_(), logits.clone().requires_grad_()
    losses = VocabularyParallelCrossEntropy.apply(part, targets, first, dist.group.WORLD)
    (losses.where(targets >= 0, 0).sum() / 8).backward()
    expected = functional.cross_entropy(full.float(), targets)
    expected.backward()
    assert part.grad is not None and full.grad is not None
    return losses[targets >= 0].mean().detach(), expected.detach(), part.grad, full.grad[:, first:end]


@each_row("world_size, vocabulary", [(2, 10), (3, 10), (4, 5)])
def test_cross_entropy(ranks: RankPool, world_size, vocabulary):
    """Exponentials of some logits overflow, and some parts are unequal."""
    for scale, dtype in ((1.0, torch.float32), (3e4, torch.float32), (5.0, torch.bfloat16)):
        for loss, full_loss, gradient, full_gradient in ranks.run(world_size, cross_entropy, scale, dtype, vocabulary):
            assert torch.allclose(loss, full_loss, rtol=1e-6) and gradient.dtype == dtype
            assert torch.allclose(gradient, full_gradient, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)


# Refusals ----------------------------------------------------------------------------------------------------------


def refuse(mesh: str, model: str, plan, expected: str) -> str:
    def cut():
        with mesh_groups(Mesh.parse(mesh), "cpu") as groups:
            module = build(model)
            layer_plan = plan or plan_of(module, groups.mesh.model_size)
            parallelize(module, layer_plan, groups, DEVICE, "--sequence" in expected)

    return message_of(UnsupportedError, cut)


@each_row(
    "model, plan, expected",
    [
        (
            "lm, gqa",
            None,
            "--mesh: model.layers.0.self_attn.k_proj has 2 heads, which cannot be cut over 3 ranks",
        ),
        ("plain", {"net.0": Column(heads=2)}, "--plan: net.0 has 11 outputs, which are not 2 equal heads"),
        ("plain", {"net.0": Column(parts=2)}, "--plan: net.0 has 11 outputs, which are not 2 equal parts"),
        ("plain", {"net.9": Column()}, '--plan: "net.9" matches no module of Plain'),
        ("plain", {"net.0": Column(), "net.*": Row()}, "--plan: net.0 is matched by several patterns"),
        ("plain", {"net.1": Column()}, "--plan: Tanh is no linear layer, and cannot be cut"),
        ("plain", None, "--mesh with tp: no plan for Plain, only for llama, mistral, qwen2, gpt2"),
        (
            "tied",
            {"first": Column(), "last": Row()},
            "--plan: last.weight is tied to a parameter that is cut in",
        ),
        (
            "plain",
            {"net.0": Column(), "net.2": Row()},
            "--sequence-parallel: the plan does not say",
        ),
        ("adapted", {"blocks.*": Region(), "blocks.*.base": Column()}, "adapter.weight is in region blocks.0, where"),
    ],
)
def test_refused_by_name(ranks: RankPool, model, plan, expected):
    for message in ranks.run(3, refuse, "tp=3", model, plan, expected):
        assert expected in message


class Overflow(torch.autograd.Function):
    """Changes nothing; the gradient is infinite."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, torch.inf)


def overflowing(strategy: Strategy, model: str, layer: str | None) -> list[tuple[bool, float, bool]]:
    """For each of three steps: whether it was skipped, the loss scale after it, and whether parameters stayed the same
    (False but in the second). In the second step, the gradient of `layer` overflows on ranks that name one."""
    assert strategy.scaler is not None
    outcomes = []
    for step in range(3):
        before, hooks = strategy.full_state_dict(), []
        if step == 1 and layer:
            module = strategy.module.get_submodule(layer)
            hooks.append(module.register_forward_hook(lambda _, __, output: Overflow.apply(output)))
        seeds = (100 * step + 10 * strategy.data_parallel_rank + micro_batch for micro_batch in range(2))
        one_step(strategy, [make_batch(model, 2, seed) for seed in seeds])
        for hook in hooks:
            hook.remove()
        after = strategy.full_state_dict()
        is_unchanged = all(torch.equal(before[name], after[name]) for name in before)
        outcomes.append((strategy.verdict.skipped, strategy.scaler.scale.item(), is_unchanged and step == 1))
    return outcomes


def overflowing_on_one_rank(choice: str) -> list[tuple[bool, float, bool]]:
    with strategy_of(Case(choice, "plain", "dp=2,tp=2", {"precision": "fp16", "loss_scale": 16.0})) as strategy:
        return overflowing(strategy, "plain", "net.0" if dist.get_rank() == 1 else None)


@each_row("choice", ["tp", "zero3"])
def test_an_overflow_in_one_part_skips_the_step_for_all(ranks: RankPool, choice):
    outcomes = ranks.run(4, overflowing_on_one_rank, choice)
    assert outcomes == [[(False, 16.0, False), (True, 8.0, True), (False, 8.0, False)]] * 4
