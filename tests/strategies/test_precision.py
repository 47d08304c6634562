"""Low precision beyond parity: what stays in fp32, and what no loss scale cures."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_lab.runtime.errors import NonFiniteError, UnsupportedError, UserError
from ddp_lab.strategy.options import StrategyOptions
from tests.models import build, make_batch
from tests.parity import (
    NAMES,
    Case,
    built,
    check_messages,
    gone_on,
    in_own_loops,
    message_of,
    one_step,
    saved_halfway,
)
from tests.ranks import RankPool
from tests.tables import each_row

CASTING = ["zero1", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3"]
BF16 = {"param_dtype": "bf16"}
LARGE, SMALL = 256.0, 2.0**-9
"""In bf16 the sum is `LARGE` again."""


def add_small_values(choice: str) -> tuple[list[float], list[float]]:
    """Weights to which steps add a small value, and answers after the full state is loaded, once and twice."""
    module = torch.nn.Linear(16, 16, bias=False)
    torch.nn.init.constant_(module.weight, LARGE)
    strategy = built(choice, module, **BF16)
    for _ in range(4):
        with strategy.micro_batch():
            (-10 * SMALL * strategy(torch.ones(1, 16))).sum().backward()
        strategy.step()
        strategy.zero_grad()
    answers = []
    for _ in range(2):
        strategy.load_full_state_dict(strategy.full_state_dict())
        with torch.no_grad():
            answers.append(strategy(torch.ones(1, 16)).sum().item())
    assert answers[0] == answers[1]
    return strategy.full_state_dict().get("weight", torch.empty(0)).unique().tolist(), answers


@each_row("choice", CASTING)
def test_small_updates_are_not_rounded_away(ranks: RankPool, choice):
    (weights, _), _ = ranks.run(2, add_small_values, choice)
    assert weights == pytest.approx([LARGE + 4 * SMALL], abs=SMALL / 4)


@each_row("saves, loads", [("zero1", "zero3"), ("zero3", "pytorch_zero2"), ("pytorch_zero3", "zero2")])
def test_any_choice_goes_on_bitwise(ranks: RankPool, tmp_path, saves, loads):
    cases = [Case(name, "llama", options=BF16, optimizer="adam") for name in (saves, loads)]
    expected, state = (
        ranks.run(2, function, case, tmp_path / "saved")[0]
        for function, case in zip((saved_halfway, gone_on), cases, strict=True)
    )
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


# fp16 ----------------------------------------------------------------------------------------------------------------


def overflow_for_ever(choice: str) -> tuple[str, bool]:
    """The error in the end, and whether parameters are those from the start."""
    strategy = built(choice, "plain", "fused", precision="fp16", loss_scale=2.0)
    before, batch = strategy.full_state_dict(), make_batch("plain", 2, 0)
    if dist.get_rank() == 1:
        batch["y"][0] = float("inf")
    for _ in range(2):
        one_step(strategy, [batch])
        assert strategy.verdict.skipped
    message = message_of(NonFiniteError, one_step, strategy, [batch])
    after = strategy.full_state_dict()
    return message, all(torch.equal(before[name], tensor) for name, tensor in after.items())


@each_row("name", ["simple_ddp", "zero3", "pytorch_zero2"])
def test_what_no_scale_cures_is_an_error(ranks: RankPool, name):
    for message, unchanged in ranks.run(2, overflow_for_ever, name):
        assert "step 2: the loss is not finite on rank 1; no parameter is updated yet; " in message
        assert "so it stays at every loss scale, which has fallen to 0.5" in message and unchanged


def forget_to_scale(choice: str) -> str:
    strategy = built(choice, precision="fp16")

    def unscaled():
        with strategy.micro_batch():
            strategy(**make_batch("plain", 2, 0)).loss.backward()

    return message_of(RuntimeError, unscaled)


@in_own_loops
def test_a_loss_that_is_not_scaled(ranks: RankPool, choice):
    assert all("fp16 without scale_loss()" in message for message in ranks.run(2, forget_to_scale, choice))


def refusals() -> dict[str, str]:
    half: Any = build("plain")
    half.net[2].half()
    messages = {"net.2.weight is fp16: call .float()": message_of(UnsupportedError, fp16, "flat_ddp", half)}
    for choice in NAMES:
        if choice.startswith("deepspeed"):
            message = message_of(UnsupportedError, fp16, choice, "plain")
            messages["--precision: DeepSpeed scales losses and keeps masters"] = message
    return messages


def fp16(choice: str, module):
    built(choice, module, precision="fp16")


def test_what_fp16_cannot_is_refused(ranks: RankPool):
    check_messages(ranks, 2, refusals)
    with pytest.raises(UserError, match="--compress int8: must be without --precision fp16, since an overflow"):
        StrategyOptions(precision="fp16", compress="int8")
