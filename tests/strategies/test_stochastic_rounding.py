"""--master-dtype bf16: no fp32 masters; updates are rounded at random, so that on average none is lost."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddp_lab.strategy.options import StrategyOptions
from sharding.options.stochastic_rounding import round_stochastically
from tests.models import build
from tests.parity import (
    OPTIMIZERS,
    global_batch,
    gone_on,
    load,
    naming,
    saved_halfway,
    weight_decay_groups,
)
from tests.ranks import RankPool
from tests.strategies.test_mixed_precision import LARGE, SMALL, resting_memory
from tests.strategies.test_traffic import profiled_step
from tests.tables import each_row

ROUNDED = {"param_dtype": "bf16", "master_dtype": "bf16"}
ALL_IN_BF16 = {**ROUNDED, "reduce_dtype": "bf16"}
STAGES = ("zero1", "zero2", "zero3")
over_stages = each_row("name", STAGES)
SPLIT = [[2, 1], [3, 1]]
BITS = st.integers(-(2**31), 2**31 - 1)
"""Of any fp32 value: normal, subnormal, infinite or NaN."""


# The rounding --------------------------------------------------------------------------------------------------------


@given(st.lists(BITS, min_size=1, max_size=50), st.integers(0, 2**31))
def test_it_gives_one_of_the_two_neighbours(patterns: list[int], seed: int) -> None:
    """In the order of patterns, the bf16 values around x are x with its lower half cut off, and the next one."""
    values = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    rounded = round_stochastically(values, torch.Generator().manual_seed(seed))
    assert rounded.dtype == torch.bfloat16
    below = torch.tensor([bits >> 16 << 16 for bits in patterns], dtype=torch.int32)
    for value, found, low, bits in zip(values, rounded, below, patterns, strict=True):
        if value.isnan():
            assert found.isnan()
        elif value.isinf() or bits == low:
            assert found == value and found.signbit() == value.signbit()
        else:
            assert found.float().view(torch.int32) - low in (0, 2**16)


def test_its_mean_is_the_value() -> None:
    for x in (1 + 2**-9, -(1 + 3 * 2**-10), 3.14159, -1e-3, 1e30, 3e-40, -2e-41, 255.9):
        many = torch.full((200_000,), x)
        rounded = round_stochastically(many, torch.Generator().manual_seed(1)).double()
        low, high = rounded.min(), rounded.max()
        assert low < many[0] < high, f"both neighbours of {x}"
        deviation = (high - low) / 2 / len(many) ** 0.5  # at most, of the mean
        assert abs(rounded.mean() - many[0].double()) < 5 * deviation, x


def test_what_is_no_number_between_two_is_kept() -> None:
    inf = float("inf")
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-133, inf, -inf])
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(round_stochastically(exact, generator).view(torch.int16), exact.bfloat16().view(torch.int16))
        patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32)
        assert round_stochastically(patterns.view(torch.float32), generator).isnan().all()


# Training ------------------------------------------------------------------------------------------------------------


def train(name: str, model: str, options: dict[str, Any], optimizer: str = "adam") -> dict[str, Any]:
    """Losses, norms, and what each rank computes with after steps with uneven micro-batches, groups and clipping."""
    settings = StrategyOptions(**{**ROUNDED, **options}, parameter_groups=weight_decay_groups)
    strategy = load(("sharding", name))(build(model, seed=dist.get_rank()), OPTIMIZERS[optimizer], settings)
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(4):
        strategy.zero_grad()
        seen["losses"].append(strategy.forward_backward(global_batch(model, SPLIT, step)[dist.get_rank()]).item())
        seen["norms"].append(strategy.clip_grad_norm_(0.5).item())
        strategy.step()
        if step == 1:
            strategy.load_full_state_dict(strategy.full_state_dict())
    held = {n: p.detach().clone() for n, p in strategy.module.named_parameters()} if name != "zero3" else {}
    return seen | {"held": held, "state": strategy.full_state_dict()}


def require_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


@over_stages
def test_it_trains_near_fp32_masters_and_the_same_again(ranks: RankPool, name: str) -> None:
    for model in ("frozen", "tied") if name == "zero3" else ("llama",):
        first, second = ranks.run(2, train, name, model, {})
        require_equal(second["held"], first["held"])
        for key, tensor in first["held"].items():
            assert torch.equal(first["state"][key], tensor), "what is computed with is what is kept"
        assert {t.dtype for t in first["state"].values() if t.is_floating_point()} == {torch.bfloat16}
        again = ranks.run(2, train, name, model, {})[0]
        assert again["losses"] == first["losses"] == second["losses"]
        require_equal(again["state"], first["state"])
        masters = ranks.run(2, train, name, model, {"master_dtype": None})[0]
        assert masters["losses"] == pytest.approx(first["losses"], rel=2e-2) and masters["losses"] != first["losses"]
        assert masters["norms"] == pytest.approx(first["norms"], rel=0.1)


def add_small_values(name: str, steps: int) -> tuple[Tensor, Tensor]:
    """Weights after updates by a 512th of the step between two bf16 values, and the same rounded to nearest."""
    module = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.constant_(module.weight, LARGE)
    nearest = module.weight.detach().bfloat16()
    strategy = load(("sharding", name))(module, lambda p: torch.optim.SGD(p, lr=1.0), StrategyOptions(**ROUNDED))
    for _ in range(steps):
        with strategy.micro_batch():
            (-SMALL * strategy(torch.ones(1, 64))).sum().backward()
        strategy.step()
        strategy.zero_grad()
        nearest = (nearest.float() + SMALL).bfloat16()
    return strategy.full_state_dict().get("weight", torch.empty(0)), nearest


@over_stages
def test_small_updates_move_weights_on_average(ranks: RankPool, name: str) -> None:
    steps, spacing = 16, 2.0
    (weight, nearest), _ = ranks.run(2, add_small_values, name, steps)
    assert torch.all(nearest == LARGE), "rounded to nearest, weights stand still"
    assert 0 < (weight != LARGE).float().mean() < 0.1
    deviation = (steps * SMALL * spacing / weight.numel()) ** 0.5
    assert weight.double().mean().item() - LARGE == pytest.approx(steps * SMALL, abs=4 * deviation)


def rounded_differently(name: str) -> list[bool]:
    """Whether steps and ranks have random numbers of their own."""
    module = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.constant_(module.weight, 0.0)
    strategy = load(("sharding", name))(module, lambda p: torch.optim.SGD(p, lr=1.0), StrategyOptions(**ROUNDED))
    states = []
    for _ in range(2):
        with torch.no_grad():
            strategy.load_full_state_dict({"weight": torch.ones(64, 64)})
        with strategy.micro_batch():
            (-(2.0**-8) * strategy(torch.ones(1, 64))).sum().backward()
        strategy.step()
        strategy.zero_grad()
        states.append(strategy.full_state_dict().get("weight"))
    if dist.get_rank() != 0:
        return []
    one, other = states
    return [torch.equal(one, other), torch.equal(one[:32], one[32:])]


def test_each_step_and_rank_has_random_numbers_of_its_own(ranks: RankPool) -> None:
    assert ranks.run(2, rounded_differently, "zero3")[0] == [False, False]


@over_stages
def test_memory_and_traffic_are_what_the_formulas_say(ranks: RankPool, name: str) -> None:
    """Padding and Adam's counters aside."""
    for options in (ROUNDED, ALL_IN_BF16):
        with naming(options):
            check_memory_and_traffic(ranks, name, options)


def check_memory_and_traffic(ranks: RankPool, name: str, options: dict[str, Any]) -> None:
    choice = ("sharding", name)
    for held, expected in ranks.run(2, resting_memory, choice, options):
        for component, size in expected.items():
            assert size <= held[component] <= 1.05 * size, component
        p2 = expected["optimizer_state"] // 2
        assert expected["parameters"] == (p2 // 2 if name == "zero3" else p2), "2 bytes each; Adam's two states have 8"
    for model in ("frozen",) if name == "zero2" else ("llama",):
        for announced, seen, _ in ranks.run(2, profiled_step, choice, model, 2, options):
            assert announced == seen, model


# Offload -------------------------------------------------------------------------------------------------------------


# Checkpoints ---------------------------------------------------------------------------------------------------------


@over_stages
def test_it_goes_on_bitwise(ranks: RankPool, tmp_path: Path, name: str) -> None:
    for optimizer in ("adam", "sgd"):
        case = ("sharding", name), "frozen", tmp_path / "saved", optimizer
        wanted = ranks.run(2, saved_halfway, ROUNDED, *case)[0]
        require_equal(ranks.run(2, gone_on, ROUNDED, *case)[0], wanted)
    for options in ({}, {"param_dtype": "bf16"}):  # a loop of one's own may change it, with fp32 values from then on
        loaded = ranks.run(2, gone_on, options, *case)[0]
        assert {tensor.dtype for tensor in loaded.values() if tensor.is_floating_point()} == {torch.float32}
        for key, tensor in wanted.items():
            torch.testing.assert_close(loaded[key], tensor, rtol=0, atol=2e-2, check_dtype=False)


# What is refused -----------------------------------------------------------------------------------------------------
