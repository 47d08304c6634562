"""fp16 with a dynamic loss scale: step by step what one process does with `torch.amp.GradScaler`, skips included."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.errors import NonFiniteError, UnsupportedError, UserError
from ddp_lab.strategy.interface import Strategy
from ddp_lab.strategy.options import StrategyOptions
from tests import parity
from tests.models import Plain, answer, build, make_batch
from tests.parity import Split, global_batch, in_own_loops, joined, load, message_of, options_of
from tests.ranks import RankPool
from tests.strategies.test_traps import Choice

TOLERANCE = 2**-9
"""Relative. Fp16 has 11 bits of mantissa; weights' gradients are summed over samples in another order."""
OPTIMIZERS = parity.OPTIMIZERS | {"fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True)}
"""Only a fused one skips a step on the device."""
SCALE = 2.0**12
HUGE = 1e6
"""A target that makes a gradient of about 1e6 x SCALE, far above what fp16 holds (65504), of a finite loss."""


class Spiked(Plain):
    """A huge target makes the gradient of one element infinite, and no other: so one shard has it."""

    def __init__(self) -> None:
        super().__init__()
        self.spike = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        is_huge = y >= HUGE
        found = answer(self.net(x), torch.where(is_huge, 2.0, y))
        found.loss = found.loss + (self.spike * torch.where(is_huge, 1e38, 0.0)).mean()
        return found


def make(model: str, seed: int = 0) -> nn.Module:
    if model != "spiked":
        return build(model, seed)
    torch.manual_seed(seed)
    return Spiked()


@dataclass
class Training:
    """What is trained.

    Attributes:
        overflows: (step, rank) in which a target of one sample is huge.
        own_loop: By `micro_batch` and `scale_loss`.
    """

    model: str = "plain"
    steps: Sequence[Split] = field(default_factory=lambda: [[[4], [4]]] * 6)
    overflows: Sequence[tuple[int, int]] = ()
    optimizer: str = "sgd"
    clip: float | None = None
    own_loop: bool = False
    growth_interval: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    def batches(self, step: int) -> list[list[dict[str, Tensor]]]:
        batches = global_batch(self.model, self.steps[step], step)
        for at, rank in self.overflows:
            if at == step:
                batches[rank][-1]["y"][0] = HUGE
        return batches

    @property
    def fp16_options(self) -> dict[str, Any]:
        return {
            "precision": "fp16",
            "loss_scale": SCALE,
            "growth_interval": self.growth_interval,
            "find_unused_parameters": self.model.startswith("branching"),
            **self.options,
        }


@dataclass
class Trace:
    """By step: the scale, whether the step was skipped, loss, norm, and what clipping said; parameters after each."""

    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)


def by_grad_scaler(training: Training) -> Trace:
    """The oracle: plain training in one process on the whole global batch."""
    module, trace = make(training.model), Trace()
    params = [p for p in module.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[training.optimizer](params)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=training.growth_interval)
    for step in range(len(training.steps)):
        before = scaler.get_scale()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = module(**joined(training.batches(step))).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        if training.clip is not None:
            trace.clipped.append(torch.nn.utils.clip_grad_norm_(params, training.clip).item())
        scaler.step(optimizer)
        scaler.update()
        trace.scales.append(before)
        trace.skipped.append(scaler.get_scale() < before)
        trace.losses.append(loss.item())
        trace.norms.append(norm.item())
        trace.states.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
    return trace


def on_rank(choice: Choice, training: Training) -> Trace:
    strategy = load(choice)(
        make(training.model, dist.get_rank()),
        OPTIMIZERS[training.optimizer],
        options_of(choice, **training.fp16_options),
    )
    trace = Trace()
    for step in range(len(training.steps)):
        mine = training.batches(step)[dist.get_rank()]
        if training.own_loop:
            losses = run_own_step(strategy, mine)
        else:
            losses = strategy.forward_backward(mine).item()
        if training.clip is not None:
            trace.clipped.append(strategy.clip_grad_norm_(training.clip).item())
        strategy.step()
        strategy.zero_grad()
        scale = strategy.verdict.loss_scale
        assert scale is not None
        trace.scales.append(scale)
        trace.skipped.append(strategy.verdict.skipped)
        trace.losses.append(losses)
        trace.norms.append(strategy.verdict.loss_and_norm[1])
        trace.states.append(strategy.full_state_dict())
    assert strategy.optimizer_steps == len(training.steps), "skipped ones count"
    return trace


def run_own_step(strategy: Strategy, batches: Sequence[dict[str, Tensor]]) -> float:
    """A step of the user's own. Returns its mean loss over the ranks."""
    weights = strategy.loss_weights([len(batch["y"]) for batch in batches])
    total = torch.zeros(())
    for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        with strategy.micro_batch(last=index == len(batches) - 1):
            loss = strategy(**batch).loss * weight
            strategy.scale_loss(loss).backward()
            total += loss.detach()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return total.item()


def check(ranks: RankPool, choice: Choice, training: Training) -> Trace:
    """Scales and skipped steps are exactly those of the oracle; losses, norms and parameters within `TOLERANCE`."""
    expected = by_grad_scaler(training)
    actual, *others = ranks.run(len(training.steps[0]), on_rank, choice, training)
    assert actual.scales == expected.scales and actual.skipped == expected.skipped
    for other in others:
        assert (other.scales, other.skipped) == (actual.scales, actual.skipped), "ranks differ"
    assert [step for step, skipped in enumerate(actual.skipped) if skipped] == [at for at, _ in training.overflows]
    for step, skipped in enumerate(expected.skipped):
        assert actual.losses[step] == pytest.approx(expected.losses[step], rel=TOLERANCE)
        if skipped:
            before = actual.states[step - 1]
            assert all(torch.equal(before[name], tensor) for name, tensor in actual.states[step].items())
        else:
            assert actual.norms[step] == pytest.approx(expected.norms[step], rel=TOLERANCE)
            assert actual.clipped[step : step + 1] == pytest.approx(expected.clipped[step : step + 1], rel=TOLERANCE)
        parity.assert_close(actual.states[step], expected.states[step], TOLERANCE, f"step {step}")
    return actual


@in_own_loops
def test_each_step_is_grad_scalers(ranks: RankPool, choice: Choice) -> None:
    """An overflow of one element on rank 1 alone, then growth; micro-batches of unequal size, clipping, Adam."""
    steps = [[[3, 2], [1, 4]]] * 8
    training = Training("spiked", steps, overflows=[(2, 1)], optimizer="fused", clip=0.5)
    trace = check(ranks, choice, training)
    assert trace.scales == [SCALE, SCALE, SCALE, *[SCALE / 2] * 3, SCALE, SCALE]


@in_own_loops
def test_own_loops(ranks: RankPool, choice: Choice) -> None:
    """With an optimizer that cannot skip on the device, and whose steps are as long as gradients are."""
    check(ranks, choice, Training("spiked", [[[2, 3], [4, 1]]] * 4, overflows=[(1, 0)], own_loop=True))
    assert all("fp16 without scale_loss()" in said for said in ranks.run(2, forget_to_scale, choice))


@pytest.mark.parametrize("name", ["bucket_ddp_async", "zero1", "zero3", "pytorch_zero3"])
def test_three_ranks(ranks: RankPool, name: str) -> None:
    steps = [[[3], [2], [2]], [[3], [3], [3]], [[1, 2], [2], [4]], [[2], [2], [2]]]
    check(ranks, named(name), Training(steps=steps, overflows=[(1, 2), (2, 0)], optimizer="fused", growth_interval=1))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("simple_ddp", "odd"),
        ("bucket_ddp_async", "branching, b-a"),
        ("zero1", "branching, a-b"),
        ("zero3", "llama"),
        ("zero3", "odd"),
        ("pytorch_ddp", "branching, a-b"),
    ],
)
def test_models(ranks: RankPool, name: str, model: str) -> None:
    """Parameters that no rank or one rank uses, tied, frozen and of several dtypes."""
    if model == "llama":  # its targets are classes, and Adam magnifies the rounding of its smallest gradients
        check(ranks, named(name), Training(model))
    else:
        check(ranks, named(name), Training(model, overflows=[(1, 1)], optimizer="fused"))


def named(name: str) -> Choice:
    return next(choice for choice in parity.all_choices() if choice[1] == name)


# What stays wrong, and what is refused -------------------------------------------------------------------------------


def overflow_for_ever(choice: Choice) -> tuple[str, bool]:
    """What is said in the end, and whether parameters are those from the start."""
    options = options_of(choice, precision="fp16", loss_scale=2.0)
    strategy = load(choice)(build("plain"), OPTIMIZERS["fused"], options)
    before, batch = strategy.full_state_dict(), make_batch("plain", 2, 0)
    if dist.get_rank() == 1:
        batch["y"][0] = float("inf")
    for _ in range(2):
        parity.one_step(strategy, [batch])
        assert strategy.verdict.skipped
    message = message_of(NonFiniteError, parity.one_step, strategy, [batch])
    after = strategy.full_state_dict()
    return message, all(torch.equal(before[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize("name", ["simple_ddp", "zero3", "pytorch_zero2"])
def test_what_no_scale_cures_is_an_error(ranks: RankPool, name: str) -> None:
    for message, unchanged in ranks.run(2, overflow_for_ever, named(name)):
        assert "step 2: the loss is not finite on rank 1; no parameter is updated yet; " in message
        assert "so it stays at every loss scale, which has fallen to 0.5" in message and unchanged


def forget_to_scale(choice: Choice) -> str:
    strategy = load(choice)(build("plain"), OPTIMIZERS["sgd"], options_of(choice, precision="fp16"))

    def unscaled() -> None:
        with strategy.micro_batch():
            strategy(**make_batch("plain", 2, 0)).loss.backward()

    return message_of(RuntimeError, unscaled)


def refusals() -> dict[str, str]:
    said = {}
    half, options = build("plain"), StrategyOptions(precision="fp16")
    half.net[2].half()  # type: ignore[index, operator]
    said["net.2.weight is fp16: call .float()"] = message_of(
        UnsupportedError, load(("ddp", "flat_ddp")), half, OPTIMIZERS["sgd"], options
    )
    for choice in parity.all_choices():
        if choice[1].startswith("deepspeed"):
            said["--precision: DeepSpeed scales losses and keeps masters"] = message_of(
                UnsupportedError, load(choice), build("plain"), OPTIMIZERS["sgd"], options
            )
    return said


def test_what_fp16_cannot_is_refused(ranks: RankPool) -> None:
    parity.check_messages(ranks, 2, refusals)
    for option in ({"overlap_optimizer": True}, {"compress": "int8"}):
        with pytest.raises(UserError, match="with --precision fp16: must be one or the other"):
            StrategyOptions(precision="fp16", **option)
