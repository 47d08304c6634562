"""--param-dtype and --reduce-dtype: shards in fp32, everything else in low precision, bitwise as FSDP2 has it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.strategy.accounting import ModelSize
from ddp_lab.strategy.options import StrategyOptions
from tests.models import build, make_batch
from tests.parity import OPTIMIZERS, global_batch, gone_on, load, naming, saved_halfway
from tests.ranks import RankPool
from tests.strategies.test_traffic import profiled_step
from tests.tables import each_row

CASTING = [("sharding", name) for name in ("zero1", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3")]
over_casting = each_row("choice", CASTING)
BF16 = {"param_dtype": "bf16"}
FP16 = {"param_dtype": "fp16", "growth_interval": 2}
ALL_IN_BF16 = {"param_dtype": "bf16", "reduce_dtype": "bf16"}
LARGE, SMALL = 256.0, 2.0**-9
"""In bf16 the sum is `LARGE` again."""


def train(choice: tuple[str, str], model: str, options: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    """Losses and state of three steps, and the gradients of the last."""
    strategy = load(choice)(build(model, seed=dist.get_rank()), OPTIMIZERS["adam"], StrategyOptions(**options))
    losses, scales = [], []
    for step in range(3):
        strategy.zero_grad()
        split = [[2] * micro_batches] * dist.get_world_size()
        losses.append(strategy.forward_backward(global_batch(model, split, step)[dist.get_rank()]).item())
        gradients = strategy.full_gradients()
        strategy.step()
        scales.append(strategy.verdict.loss_scale)
    return {"losses": losses, "scales": scales, "gradients": gradients, "state": strategy.full_state_dict()}


@pytest.mark.parametrize("choice", CASTING[:3], ids="-".join)
def test_it_is_bitwise_fsdp2(ranks: RankPool, choice: tuple[str, str]) -> None:
    """With two ranks sums have one order. ZeRO-1 adds micro-batches up before it reduces, FSDP2 behind."""
    every = (BF16, ALL_IN_BF16, {"reduce_dtype": "bf16"}, FP16)
    for options in every if choice[1] == "zero3" else every[:2]:
        with naming(options):
            check_against_fsdp2(ranks, choice, options)


def check_against_fsdp2(ranks: RankPool, choice: tuple[str, str], options: dict[str, Any]) -> None:
    micro_batches = 1 if choice[1] == "zero1" else 2
    for model in ("tied", "frozen") if options == BF16 and choice[1] == "zero3" else ("llama",):
        case = model, options, micro_batches
        ours, theirs = (ranks.run(2, train, of, *case) for of in (choice, ("sharding", "pytorch_zero3")))
        assert ours[0]["losses"] == theirs[0]["losses"] == ours[1]["losses"]
        assert ours[0]["scales"] == theirs[0]["scales"]
        if options == FP16:
            assert ours[0]["scales"] == [2.0**16, 2.0**16, 2.0**17]
            assert not all(gradient.isfinite().all() for gradient in ours[0]["gradients"].values()), (
                "the last overflows"
            )
        for kind in ("gradients", "state"):
            assert ours[0][kind].keys() == theirs[0][kind].keys()
            for name, tensor in theirs[0][kind].items():
                torch.testing.assert_close(ours[0][kind][name], tensor, rtol=0, atol=0, equal_nan=True)
                assert tensor.dtype == torch.float32 or not tensor.is_floating_point()


def add_small_values(choice: tuple[str, str]) -> Tensor:
    module = torch.nn.Linear(16, 16, bias=False)
    torch.nn.init.constant_(module.weight, LARGE)
    strategy = load(choice)(module, lambda p: torch.optim.SGD(p, lr=1.0), StrategyOptions(**BF16))
    for _ in range(4):
        with strategy.micro_batch():
            (-SMALL * strategy(torch.ones(1, 16))).sum().backward()
        strategy.step()
        strategy.zero_grad()
    return strategy.full_state_dict().get("weight", torch.empty(0))


@over_casting
def test_small_updates_are_not_rounded_away(ranks: RankPool, choice: tuple[str, str]) -> None:
    weight, _ = ranks.run(2, add_small_values, choice)
    assert torch.equal(weight, torch.full((16, 16), LARGE + 4 * SMALL))


@over_casting
def test_traffic_is_what_is_announced(ranks: RankPool, choice: tuple[str, str]) -> None:
    for model, micro_batches, options in (("frozen", 2, BF16), ("plain", 1, ALL_IN_BF16)):
        for announced, seen, _ in ranks.run(2, profiled_step, choice, model, micro_batches, options):
            assert announced == seen, f"{model}, {options}"


def resting_memory(choice: tuple[str, str], options: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    module = build("llama")
    size = ModelSize.of(module)
    strategy = load(choice)(module, OPTIMIZERS["adam"], StrategyOptions(**options))
    strategy.forward_backward([make_batch("llama", 2, 0)])
    strategy.step()
    return strategy.memory_breakdown(), strategy.expected_memory(size)


@over_casting
def test_memory_is_what_the_formula_says(ranks: RankPool, choice: tuple[str, str]) -> None:
    """Padding and Adam's counters aside."""
    for options in (BF16, {"reduce_dtype": "bf16"}):
        for held, expected in ranks.run(2, resting_memory, choice, options):
            for component, size in expected.items():
                assert size <= held[component] <= 1.05 * size, f"{component}, {options}"


@each_row("saves, loads", [("zero1", "zero3"), ("zero3", "pytorch_zero2"), ("pytorch_zero3", "zero2")])
def test_any_choice_goes_on_bitwise(ranks: RankPool, tmp_path: Path, saves: str, loads: str) -> None:
    wanted = ranks.run(2, saved_halfway, BF16, ("sharding", saves), "llama", tmp_path / "saved")[0]
    state = ranks.run(2, gone_on, BF16, ("sharding", loads), "llama", tmp_path / "saved")[0]
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


def loaded_whole(choice: tuple[str, str], options: dict[str, Any] = BF16) -> tuple[list[float], list[float]]:
    """Losses of evaluation and of a step, before and after the whole state went out and in again."""
    strategy = load(choice)(build("frozen"), OPTIMIZERS["adam"], StrategyOptions(**options))
    losses: list[list[float]] = [[], []]
    for seen in losses:
        strategy.load_full_state_dict(strategy.full_state_dict())
        with torch.no_grad():
            seen.append(strategy(**make_batch("frozen", 4, 1)).loss.item())
    return losses[0], losses[1]


@over_casting
def test_the_whole_state_goes_out_and_in(ranks: RankPool, choice: tuple[str, str]) -> None:
    for before, after in ranks.run(2, loaded_whole, choice):
        assert before == after
